"""Counters of every learner's optimizer: applied steps, and the learning rate and loss scale that follow from them."""

from __future__ import annotations

from collections.abc import Mapping

from moe_trm.config.learning_rate import LearningRate
from moe_trm.learner.loss_scale import LossScale
from moe_trm.learner.protocol import UpdateResult


class Steps:
    """Steps under a schedule; a refused one does not advance it.

    Args:
        rate: the learning rate of each step.
        loss_scale: of a float16 model, else None.

    Attributes:
        steps: those that were applied.
    """

    def __init__(self, rate: LearningRate, loss_scale: LossScale | None) -> None:
        self._rate, self.loss_scale, self.steps = rate, loss_scale, 0

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return self._rate.at(self.steps)

    def finish(self, grad_norm: float, lr: float, *, applied: bool, cosine: float | None = None) -> UpdateResult:
        """Count a step that was tried."""
        self.steps += int(applied)
        used = None
        if self.loss_scale is not None:
            used = self.loss_scale.value
            self.loss_scale.update(applied=applied)
        return UpdateResult(grad_norm, lr, applied, used, cosine)

    def counters(self) -> dict[str, int]:
        """State for a checkpoint, the same on every rank."""
        return {"optimizer_steps": self.steps} | (self.loss_scale.counters() if self.loss_scale is not None else {})

    def restore(self, counters: Mapping[str, int]) -> None:
        """Go on after `counters`."""
        self.steps = counters["optimizer_steps"]
        if self.loss_scale is not None:
            self.loss_scale.restore(counters)
