"""The reference policy: its scores, its place in loss, reward or advantage, and what sets its coefficient.

Shape letters: B rows and R forwarded tokens of a micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from moe_trm.config.schema import Config
from moe_trm.errors import LearnerError
from moe_trm.learner.protocol import Learner
from moe_trm.losses.kl import AdaptiveKL, kl_estimate
from moe_trm.step.passes import AnchoredMinibatch
from moe_trm.step.recipe import recipe
from moe_trm.types import TokenBatch
from routing.record.sources import Native

NAME = "reference"
"""The learner's snapshot of the weights that the run started from."""


class Reference:
    """The weights that the run started from, or a teacher, and the coefficient of the KL to them.

    Does nothing where `kl.coef` is 0 and the loss reads no reference. Build it before anything is trained or restored.
    Collective, as all of its methods.
    """

    def __init__(self, config: Config, learner: Learner) -> None:
        kl = config.kl
        horizon = kl.horizon if kl.controller == "adaptive" else math.inf
        self._config = config
        self._requested = kl.coef > 0 or "reference" in recipe(config).loss.loss.needs
        self._controller = AdaptiveKL(kl.coef, kl.target, horizon)
        if self._requested and not kl.teacher:
            learner.snapshot(NAME)

    @property
    def coef(self) -> float:
        """The coefficient of the next step."""
        return self._controller.beta

    def state(self) -> dict[str, float]:
        """State for a checkpoint between two steps, as plain data; the reference itself is the start checkpoint."""
        return {"coef": self.coef}

    def restore(self, state: Mapping[str, float]) -> None:
        """Go on after `state`."""
        self._controller = replace(self._controller, beta=state["coef"])

    def add_logprobs(self, learner: Learner, minibatches: Sequence[AnchoredMinibatch]) -> list[AnchoredMinibatch]:
        """The minibatches of a step with the reference's log-probs, scored under its own routes or by the teacher."""
        if not self._requested:
            return list(minibatches)
        flat = [batch for part in minibatches for batch in part.batches]
        if not self._config.kl.teacher:
            scores = learner.score(flat, [Native()] * len(flat), weights=NAME)
            flat = [
                replace(batch, reference_logprobs=score.logprobs) for batch, score in zip(flat, scores, strict=True)
            ]
        checked = iter([_checked(batch) for batch in flat])
        coef = self.coef if self._config.kl.where == "loss" else 0.0
        return [replace(part, batches=[next(checked) for _ in part.batches], kl_coef=coef) for part in minibatches]

    def subtract_kl_from_advantages(self, minibatches: Sequence[AnchoredMinibatch]) -> list[AnchoredMinibatch]:
        """These minibatches with A_t - coef kl_t in the place of A_t on every sampled token, where the configuration
        says `kl.where=advantage`. With k1 it has the gradient of the KL of each token, by the score function.
        """
        if not self._config.kl.before_updates or self._config.kl.where == "reward":
            return list(minibatches)
        return [
            replace(
                part,
                batches=[
                    replace(batch, advantages=batch.advantages - self.coef * kl.to(batch.advantages))
                    for batch, kl in zip(part.batches, self._kls(part), strict=True)
                ],
            )
            for part in minibatches
        ]

    def adapt(self, measured: Mapping[str, float], num_samples: int) -> dict[str, float]:
        """End a step of `num_samples` samples with these finished metrics.

        `kl/coef` is the coefficient that it used.
        """
        if not self._requested:
            return {}
        used = self.coef
        self._controller = self._controller.next(measured["reference/k3_kl"], num_samples)
        return {"kl/coef": used}

    def kl_penalties(self, minibatches: Sequence[AnchoredMinibatch]) -> list[float] | None:
        """coef sum_t kl_it, by which the reward of each row of these scored minibatches is lowered; None: by nothing.

        In the order of the micro-batches.
        """
        if not self._config.kl.before_updates or self._config.kl.where == "advantage":
            return None
        return [
            self.coef * kl
            for part in minibatches
            for micro, kls in zip(part.mini.micro_batches, self._kls(part), strict=True)
            # An empty micro-batch has one row of padding.
            for _, kl in zip(micro.rows, kls.sum(dim=1).tolist(), strict=False)
        ]

    def _kls(self, part: AnchoredMinibatch) -> list[Tensor]:
        """`[B, R]` KL of the sampled tokens of each micro-batch at the step's start, nats; 0 elsewhere."""
        return [
            kl_estimate(self._config.kl.estimator, score.logprobs, batch.reference_logprobs, batch.mask)
            for batch, score in zip(part.batches, part.scores, strict=True)
            if batch.reference_logprobs is not None
        ]


def _checked(batch: TokenBatch) -> TokenBatch:
    """A batch of padding has no sample, and so no log-probs."""
    if batch.reference_logprobs is None and not batch.mask.any():
        return replace(batch, reference_logprobs=torch.zeros_like(batch.rollout_logprobs))
    if batch.reference_logprobs is None:
        raise LearnerError("a sample came without the teacher's log-probs", where="kl.teacher", got=batch.sample_ids)
    return batch
