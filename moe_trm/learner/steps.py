"""State of every learner's optimizer beside Adam's: applied steps, the learning rate and loss scale that follow from
them, and the gradient before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from moe_trm.config.learning_rate import LearningRate
from moe_trm.learner.alignment import GradientAlignment
from moe_trm.learner.loss_scale import LossScale
from moe_trm.learner.protocol import UpdateResult


class Steps:
    """Steps under a schedule; one that is refused, or that has nothing to train, does not advance it.

    `alignment` is of consecutive gradients, where it is measured. `steps` counts those that were applied.
    """

    def __init__(
        self, rate: LearningRate, loss_scale: LossScale | None, alignment: GradientAlignment | None = None
    ) -> None:
        self._rate, self.loss_scale, self._alignment, self.steps = rate, loss_scale, alignment, 0

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return self._rate.at(self.steps)

    @property
    def scale(self) -> float:
        """Times which backward begins at the loss of the next step."""
        return 1.0 if self.loss_scale is None else float(self.loss_scale.value)

    def finish(self, grad_norm: float, lr: float, *, applied: bool, cosine: float | None = None) -> UpdateResult:
        """Count a step that was tried. One with a gradient of zero never is: it would decay weights, no more."""
        scale = None if self.loss_scale is None else self.loss_scale.value
        result = UpdateResult(grad_norm, lr, applied, scale, cosine)
        if not result.is_empty:
            self.steps += int(applied)
            if self.loss_scale is not None:
                self.loss_scale.update(applied=applied)
        return result

    def _updated(self) -> Sequence[Tensor]:
        """The tensors that this rank's optimizer updates, in the order of its gradients."""
        return ()

    def previous_gradients(self) -> dict[Tensor, Tensor]:
        """The gradient before, flat, by the tensor that was updated with it; empty where none is remembered."""
        if self._alignment is None or self._alignment.previous is None:
            return {}
        updated = self._updated()
        parts = torch.split(self._alignment.previous, [tensor.numel() for tensor in updated])
        return dict(zip(updated, parts, strict=True))

    def remember(self, gradients: Mapping[Tensor, Tensor]) -> None:
        """Go on after `gradients`, as `previous_gradients` has them."""
        if self._alignment is not None and gradients:
            self._alignment.restore(torch.cat([gradients[tensor].flatten() for tensor in self._updated()]))

    def counters(self) -> dict[str, int]:
        """State for a checkpoint, the same on every rank."""
        return {"optimizer_steps": self.steps} | (self.loss_scale.counters() if self.loss_scale is not None else {})

    def restore(self, counters: Mapping[str, int]) -> None:
        """Go on after `counters`."""
        self.steps = counters["optimizer_steps"]
        if self.loss_scale is not None:
            self.loss_scale.restore(counters)
