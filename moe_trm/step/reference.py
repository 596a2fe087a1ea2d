"""The frozen reference policy: its scores, its place in the loss or in the reward, and what sets its coefficient.

Shape letters: B rows and R forwarded tokens of a micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from moe_trm.config.schema import Config
from moe_trm.learner.protocol import Learner
from moe_trm.losses.kl import AdaptiveKL, kl_estimate
from moe_trm.step.passes import Anchored
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
        """The minibatches of a step with the reference's log-probs, scored under its own routes."""
        if not self._wanted:
            return list(anchored)
        flat = [batch for part in anchored for batch in part.batches]
        scores = iter(learner.score(flat, [Native()] * len(flat), weights=NAME))
        scored = [replace(part, reference=[next(scores).logprobs for _ in part.batches]) for part in anchored]
        return scored if self._config.kl.where == "reward" else [replace(part, kl_coef=self.coef) for part in scored]

    def adapt(self, measured: Mapping[str, float], num_samples: int) -> dict[str, float]:
        """End a step of `num_samples` samples with these finished metrics.

        `kl/coef` is the coefficient that it used.
        """
        if not self._wanted:
            return {}
        used = self.coef
        self._controller = self._controller.next(measured["reference/k3_kl"], num_samples)
        return {"kl/coef": used}

    def penalties(self, anchored: Sequence[Anchored]) -> list[float] | None:
        """coef sum_t kl_it, by which the reward of each row of these scored minibatches is lowered; None: by nothing.

        In the order of the micro-batches.
        """
        if not self._wanted or self._config.kl.where == "loss":
            return None
        return [
            self.coef * kl
            for part in anchored
            for micro, own in zip(part.mini.micro_batches, self._row_kls(part), strict=True)
            for _, kl in zip(micro.rows, own, strict=False)  # an empty micro-batch has one row of padding
        ]

    def _row_kls(self, part: Anchored) -> list[list[float]]:
        """Sum of the KL over the sampled tokens of each row of each micro-batch, nats."""
        assert part.reference is not None
        return [
            kl_estimate(self._config.kl.estimator, score.logprobs, reference, batch.mask).sum(dim=1).tolist()
            for batch, score, reference in zip(part.batches, part.scores, part.reference, strict=True)
        ]
