"""The learning rate of every optimizer step, the same in every learner. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from moe_trm.config.schema import LearnerConfig, OptimizerConfig, TrainConfig


@dataclass(frozen=True)
class LearningRate:
    """Warm-up, then a schedule from `lr` down to `min_lr`; a number for each step, no state.

    Attributes:
        settings: of the optimizer.
        num_steps: D, the steps until `min_lr`; afterwards it stays there.
    """

    settings: OptimizerConfig
    num_steps: int

    def at(self, step: int) -> float:
        """The rate of step t = `step`, counted from 0, with W steps of warm-up.

        | schedule | rate for t >= W, with p = (t - W) / (D - W), at most 1 |
        |---|---|
        | `constant` | lr |
        | `linear` | min_lr + (lr - min_lr) (1 - p) |
        | `cosine` | min_lr + (lr - min_lr) (1 + cos(pi p)) / 2 |
        | `wsd` | lr until D - F, then linear to min_lr over F = `final_steps` |

        For t < W it is lr (t + 1) / W.
        """
        settings, warmup = self.settings, self.settings.warmup_steps
        if step < warmup:
            return settings.lr * (step + 1) / warmup
        return settings.min_lr + (settings.lr - settings.min_lr) * self._height(step)

    @property
    def final_steps(self) -> int:
        """F: steps over which `wsd` goes down."""
        configured = self.settings.final_steps
        return max(1, round(0.1 * self.num_steps)) if configured is None else configured

    def _height(self, step: int) -> float:
        """Between 1 (`lr`) and 0 (`min_lr`)."""
        schedule = self.settings.schedule
        if schedule == "constant":
            return 1.0
        start = self.num_steps - self.final_steps if schedule == "wsd" else self.settings.warmup_steps
        progress = min(1.0, max(0.0, (step - start) / max(1, self.num_steps - start)))
        return (1 + math.cos(math.pi * progress)) / 2 if schedule == "cosine" else 1 - progress


def learning_rate(optimizer: OptimizerConfig, learner: LearnerConfig, train: TrainConfig) -> LearningRate:
    """The schedule of a run; without `optimizer.decay_steps` it ends with the run's last optimizer step."""
    all_steps = train.steps * learner.minibatches * learner.epochs
    return LearningRate(optimizer, optimizer.decay_steps or all_steps)
