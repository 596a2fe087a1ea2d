"""Guards that lower the learning rate of a step: data far from the policy (VCPO), and answers that suddenly grow.

Shape letter: N rows of the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from moe_trm.config.schema import OptimizerConfig
from moe_trm.learner.protocol import Learner
from moe_trm.losses.off_policy import ess_lr_scale, ess_ratio, surge_lr
from moe_trm.step.passes import AnchoredMinibatch, log_sequence_ratios


class RateGuard:
    """The factor on the scheduled learning rate of each training step, at most 1.

    Args:
        settings: `ess_scale`, `surge_limit`, `surge_window` of the optimizer.
    """

    def __init__(self, settings: OptimizerConfig) -> None:
        self._settings = settings
        self._lengths: list[float] = []
        self._surge_factor, self._cool_down = 1.0, 0

    def state(self) -> dict[str, Any]:
        """State for a checkpoint between two steps, as plain data."""
        return {"lengths": self._lengths, "surge_factor": self._surge_factor, "cool_down": self._cool_down}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on after `state`."""
        self._lengths, self._surge_factor, self._cool_down = (
            list(state["lengths"]),
            state["surge_factor"],
            state["cool_down"],
        )

    def scale(
        self, learner: Learner, minibatches: Sequence[AnchoredMinibatch], length_mean: float
    ) -> tuple[float, dict[str, float]]:
        """The factor of the step with these minibatches and this mean length of answers, and its metrics.

        Collective.
        """
        metrics: dict[str, float] = {}
        factor = self._surge(length_mean)
        if self._settings.ess_scale != "off":
            ratio = float(ess_ratio(sequence_weights(learner, minibatches)))
            metrics["optimizer/eff_sample_size"] = ratio
            factor *= ess_lr_scale(ratio, form=self._settings.ess_scale)
        if self._settings.ess_scale != "off" or self._settings.surge_limit is not None:
            metrics["optimizer/lr_scale"] = factor
        return factor, metrics

    def _surge(self, length_mean: float) -> float:
        limit, window = self._settings.surge_limit, self._settings.surge_window
        if limit is None:
            return 1.0
        self._cool_down = max(0, self._cool_down - 1)
        if len(self._lengths) == window and self._cool_down == 0:
            lowered = surge_lr(self._surge_factor, length_mean, self._lengths[0], initial_lr=1.0, surge=limit)
            self._cool_down = window if lowered < self._surge_factor else 0
            self._surge_factor = lowered
        self._lengths = [*self._lengths[-window + 1 :], length_mean] if window > 1 else [length_mean]
        return self._surge_factor


def sequence_weights(learner: Learner, minibatches: Sequence[AnchoredMinibatch]) -> torch.Tensor:
    """Ratio of each row of the step, policy at its start over rollout, `[N]` of all ranks, divided by the largest.

    Collective.
    """
    log_weights = learner.gather(torch.tensor(log_sequence_ratios(minibatches), dtype=torch.float64))
    return (log_weights - log_weights.max()).exp()
