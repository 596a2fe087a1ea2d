"""From a minibatch's anchor scores to the loss of each micro-batch: ratios, corrections, policy loss, aggregation, and their metrics.

Shape letters: B rows, R forwarded tokens of the longest row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from moe_trm import corrections, diagnostics, losses, summable
from moe_trm.config.schema import Config
from moe_trm.corrections import Evidence
from moe_trm.learner.protocol import Scores
from moe_trm.losses import LossInputs, aggregate
from moe_trm.passes import Anchored
from moe_trm.ratios import LogRatios

Reduce = Callable[[Mapping[str, Tensor]], dict[str, float]]


class Objective:
    """The configured corrections and loss; collects summable metrics until `take`.

    Raises:
        ConfigError: an unknown rule, loss, threshold or parameter, before anything runs.
    """

    def __init__(self, config: Config) -> None:
        self._correct = corrections.compose(
            [corrections.get(rule.name).bind(**rule.thresholds) for rule in config.correction.rules]
        )
        self._loss = losses.get(config.loss.name).bind(
            clip_low=config.loss.clip_low, clip_high=config.loss.clip_high, dual_clip=config.loss.dual_clip
        )
        self._aggregation, self._horizon = config.loss.aggregation, config.rollout.max_new_tokens
        self._metrics: list[Mapping[str, Tensor]] = []

    def bind(self, part: Anchored, *, first: bool) -> Callable[[int, Scores], Tensor]:
        """`objective(i, current) -> loss share` of the micro-batches of `part`.

        `first`: these are the first updates of the step, at the very weights that scored the anchors; in synchronous training their
        log-update must be exactly zero, and `update/first_nonzero_fraction` says whether it was.
        """

        def loss_of(index: int, current: Scores) -> Tensor:
            batch, anchor, current_logprobs = part.batches[index], part.scores[index], current.logprobs
            ratios = LogRatios(batch.rollout_logprobs, anchor.logprobs, current_logprobs, batch.mask)
            evidence = Evidence(ratios, batch.advantages, batch.turn_ids, batch.versions, current.exact_kl)
            correction = self._correct(evidence)
            inputs = LossInputs.corrected(ratios, current_logprobs, batch.advantages, correction)
            token_loss = self._loss(inputs)
            loss = aggregate(
                token_loss.values,
                correction.keep,
                ratios.mask,
                self._aggregation,
                num_sequences=part.mini.num_sequences,
                num_tokens=part.mini.num_tokens,
                horizon=self._horizon,
            )
            self._metrics.append(
                {
                    "loss/policy": loss.detach().double(),
                    **token_loss.metrics,
                    **correction.metrics,
                    **diagnostics.metrics(evidence),
                    **diagnostics.acceptance(evidence, correction),
                    **_first_update(ratios, first),
                }
            )
            return loss

        return loss_of

    def take(self, reduce: Reduce) -> dict[str, float]:
        """Metrics of all micro-batches since the last call, over all ranks, finished into plain numbers."""
        collected, self._metrics = self._metrics, []
        return summable.finalize(reduce(summable.add(collected)))


def _first_update(ratios: LogRatios, first: bool) -> dict[str, Tensor]:
    changed = ratios.update.detach() != 0
    return summable.fraction("update/first_nonzero_fraction", changed, ratios.mask & first)
