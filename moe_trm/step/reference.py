"""The frozen reference policy: its scores, its place in the loss or in the reward, and what sets its coefficient.

Shape letters: B rows and R forwarded tokens of a micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from moe_trm.batch.advantages import Array
from moe_trm.batch.filters import without_overlong
from moe_trm.batch.outcome import outcome_advantages
from moe_trm.config.schema import Config
from moe_trm.learner.protocol import Learner
from moe_trm.losses.kl import AdaptiveKL, kl_estimate
from moe_trm.step.passes import Anchored
from moe_trm.types import TokenBatch
from routing.replay import Native

NAME = "reference"
"""The learner's snapshot of the weights that the run started from."""


class Reference:
    """The weights that the run started from, and the coefficient of the KL to them. Does nothing where `kl.coef` is 0.

    Build it before anything is trained or restored. Collective, as all of its methods.

    Args:
        config: the run's configuration.
        learner: at the start checkpoint's weights.
    """

    def __init__(self, config: Config, learner: Learner) -> None:
        kl = config.kl
        horizon = kl.horizon if kl.controller == "adaptive" else math.inf
        self._config, self._wanted = config, kl.coef > 0
        self._controller = AdaptiveKL(kl.coef, kl.target, horizon)
        if self._wanted:
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

    def score(self, learner: Learner, anchored: Sequence[Anchored]) -> list[Anchored]:
        """The minibatches of a step with the reference's log-probs, scored under its own routes, and with the
        advantages that the KL leaves.
        """
        if not self._wanted:
            return list(anchored)
        flat = [batch for part in anchored for batch in part.batches]
        scores = iter(learner.score(flat, [Native()] * len(flat), weights=NAME))
        scored = [replace(part, reference=[next(scores).logprobs for _ in part.batches]) for part in anchored]
        if self._config.kl.where == "loss":
            return [replace(part, kl_coef=self.coef) for part in scored]
        return self._rewarded(learner, scored)

    def adapt(self, measured: Mapping[str, float], num_samples: int) -> dict[str, float]:
        """End a step of `num_samples` samples with these finished metrics.

        `kl/coef` is the coefficient that it used.
        """
        if not self._wanted:
            return {}
        used = self.coef
        self._controller = self._controller.next(measured["reference/k3_kl"], num_samples)
        return {"kl/coef": used}

    def _rewarded(self, learner: Learner, parts: Sequence[Anchored]) -> list[Anchored]:
        """Advantages anew from R_i - coef sum_t kl_it, compared within the groups of the whole step."""
        rows = [
            (row.record, kl)
            for part in parts
            for micro, kls in zip(part.mini.micro_batches, self._row_kls(part), strict=True)
            for row, kl in zip(micro.rows, kls, strict=False)  # an empty micro-batch has one row of padding
        ]
        records = [record for record, _ in rows]
        ids = _everyone(learner, [record.sample_id for record in records])
        rewards = _everyone(learner, [(record.reward or 0.0) - self.coef * kl for record, kl in rows])
        groups = _everyone(learner, [record.group_id for record in records])
        lengths = _everyone(learner, [record.num_sampled for record in records])
        settings = self._config.advantage
        advantages = outcome_advantages(
            settings.name,
            rewards,
            groups,
            lengths,
            normalize_std=settings.normalize_std,
            lone=settings.lone_sample,
        )
        of_sample = dict(zip(ids.tolist(), advantages.tolist(), strict=True))
        own = np.array([of_sample[record.sample_id] for record in records])
        values = iter(without_overlong(records, own, self._config.batch).tolist())
        return [
            replace(
                part,
                batches=[
                    _with_advantages(batch, [next(values) for _ in micro.rows])
                    for batch, micro in zip(part.batches, part.mini.micro_batches, strict=True)
                ],
            )
            for part in parts
        ]

    def _row_kls(self, part: Anchored) -> list[list[float]]:
        """Sum of the KL over the sampled tokens of each row of each micro-batch, nats."""
        assert part.reference is not None
        return [
            kl_estimate(self._config.kl.estimator, score.logprobs, reference, batch.mask).sum(dim=1).tolist()
            for batch, score, reference in zip(part.batches, part.scores, part.reference, strict=True)
        ]


def _everyone(learner: Learner, values: Sequence[float]) -> Array:
    return learner.gather(torch.tensor(values, dtype=torch.float64)).cpu().numpy()


def _with_advantages(batch: TokenBatch, of_row: Sequence[float]) -> TokenBatch:
    advantages = torch.zeros(len(batch.mask), 1)
    advantages[: len(of_row), 0] = torch.tensor(of_row)
    return replace(batch, advantages=torch.where(batch.mask, advantages.to(batch.mask.device), 0.0))
