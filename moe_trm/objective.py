"""From a minibatch's anchor scores to the loss of each micro-batch: ratios, corrections, policy loss, aggregation, and their metrics.

Shape letters: B rows, R forwarded tokens of the longest row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from moe_trm import corrections, diagnostics, summable
from moe_trm.config.schema import Config
from moe_trm.corrections import Correction, Evidence
from moe_trm.corrections.batch_norm import WEIGHING, normalized, weight_sums
from moe_trm.learner.protocol import Learner, Scores
from moe_trm.losses import LossInputs, TokenLoss, aggregate
from moe_trm.minibatch import WholeMinibatch, gather_minibatch
from moe_trm.passes import Anchored
from moe_trm.ratios import LogRatios
from moe_trm.recipe import Recipe, recipe
from moe_trm.thresholds import Frozen, Thresholds


class Objective:
    """The configured corrections and loss; collects summable metrics until `take`.

    Args:
        config: the run's configuration.
        run_dir: where calibrated thresholds are kept (`thresholds.json`); None keeps them in memory.
        frozen: calibrated thresholds of an earlier part of this run.

    Raises:
        ConfigError: an unknown rule, loss, threshold or parameter, before anything runs.
    """

    def __init__(self, config: Config, run_dir: Path | None = None, frozen: Frozen | None = None) -> None:
        self._recipe = recipe(config)
        path = run_dir / "thresholds.json" if run_dir else None
        self._thresholds = Thresholds(self._recipe.uncalibrated, config.correction.calibration_steps, path, frozen)
        self._metrics: list[Mapping[str, Tensor]] = []
        self._num_updates = 0

    @property
    def thresholds(self) -> Frozen:
        """Calibrated thresholds by rule, as plain data for a checkpoint; empty while rules still measure."""
        return self._thresholds.frozen

    def bind(self, part: Anchored, learner: Learner, *, first: bool) -> Callable[[int, Scores], Tensor]:
        """`objective(i, current) -> loss share` of the micro-batches of `part`. Collective: every rank binds its share.

        `first`: these are the first updates of the step, at the very weights that scored the anchors; in synchronous training their
        log-update must be exactly zero, and `update/first_nonzero_fraction` says whether it was.
        """
        chosen = replace(self._recipe, rules=(*self._recipe.rules, *self._thresholds.rules))
        judge = _judge(chosen, part, learner, first=first)
        self._num_updates += 1

        def loss_of(index: int, current: Scores) -> Tensor:
            batch, anchor = part.batches[index], part.scores[index]
            ratios = LogRatios(batch.rollout_logprobs, anchor.logprobs, current.logprobs, batch.mask)
            evidence = Evidence(
                ratios, batch.advantages, batch.turn_ids, batch.versions, current.exact_kl, batch.rewards
            )
            self._thresholds.observe(evidence)
            correction, token_loss = judge(index, evidence, current.logprobs, batch.group_ids)
            loss = aggregate(
                token_loss.values,
                correction.keep,
                ratios.mask,
                chosen.aggregation,
                num_sequences=part.mini.num_sequences,
                num_tokens=part.mini.num_tokens,
                horizon=chosen.horizon,
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

    def take(self, learner: Learner) -> dict[str, float]:
        """Metrics of all micro-batches since the last call, over all ranks, finished into plain numbers. Ends a step. Collective.

        `loss/policy` is the mean over the updates; each micro-batch has only its share of one.
        """
        collected, self._metrics = self._metrics, []
        metrics = summable.finalize(learner.reduce(summable.add(collected)))
        metrics["loss/policy"] /= self._num_updates
        self._num_updates = 0
        return metrics | self._thresholds.end_step(learner)


class PartialJudge:
    """Corrections and token losses of a micro-batch by itself, where neither needs to know of the others."""

    def __init__(self, chosen: Recipe) -> None:
        self._correct, self._loss = corrections.compose(chosen.rules), chosen.loss

    def __call__(
        self, index: int, evidence: Evidence, current_logprobs: Tensor, group_ids: Tensor | None
    ) -> tuple[Correction, TokenLoss]:
        correction = self._correct(evidence)
        inputs = replace(
            LossInputs.corrected(evidence.ratios, current_logprobs, evidence.advantages, correction),
            turn_ids=evidence.turn_ids,
            rewards=evidence.rewards,
            group_ids=group_ids,
        )
        return correction, self._loss(inputs)


class WholeJudge:
    """The same computed over the whole minibatch, of which a micro-batch is told its part."""

    def __init__(self, chosen: Recipe, whole: WholeMinibatch) -> None:
        self._loss, self._whole, self._whole_loss = chosen.loss, whole, chosen.whole_loss
        evidence = whole.evidence
        correction = corrections.compose(chosen.rules, whole_minibatch=True)(evidence)
        if chosen.batch_normalize != "off":
            weighing = [bound for bound in chosen.rules if bound.rule.name in WEIGHING]
            weights = corrections.compose(weighing)(evidence)
            correction = normalized(correction, weight_sums(weights, whole.mask, chosen.batch_normalize))
            moments = summable.moments("correction/weight", correction.weights, whole.mask)
            correction = replace(correction, metrics={**correction.metrics, **moments})
        self._correction = correction

    def __call__(
        self, index: int, evidence: Evidence, current_logprobs: Tensor, group_ids: Tensor | None
    ) -> tuple[Correction, TokenLoss]:
        whole, correction, mask = self._whole, self._correction, evidence.mask
        own = replace(
            correction,
            weights=whole.part(index, correction.weights, mask),
            keep=whole.part(index, correction.keep, mask),
        )
        if self._whole_loss:
            loss = self._loss(whole.inputs(index, current_logprobs, mask, correction.weights, correction.keep))
            return own, replace(loss, values=whole.part(index, loss.values, mask))
        inputs = replace(
            LossInputs.corrected(evidence.ratios, current_logprobs, evidence.advantages, own),
            turn_ids=evidence.turn_ids,
            rewards=evidence.rewards,
            group_ids=group_ids,
        )
        return own, self._loss(inputs)


def _judge(chosen: Recipe, part: Anchored, learner: Learner, *, first: bool) -> PartialJudge | WholeJudge:
    """How this minibatch is judged: by parts, or as a whole at the weights of this update.

    The whole is gathered at the anchors' scores where nothing has moved since; otherwise after one more pass without gradient.
    """
    if not (chosen.whole_rules or chosen.whole_loss):
        return PartialJudge(chosen)
    moved = chosen.moves and not first
    current = learner.score(part.batches, part.sources) if moved else part.scores
    with torch.no_grad():
        return WholeJudge(chosen, gather_minibatch(part, current, learner))


def _first_update(ratios: LogRatios, first: bool) -> dict[str, Tensor]:
    changed = ratios.update.detach() != 0
    return summable.fraction("update/first_nonzero_fraction", changed, ratios.mask & first)
