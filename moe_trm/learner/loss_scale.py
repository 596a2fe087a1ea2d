"""The factor on the loss under which small gradients survive float16, and how it moves. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping

from moe_trm.config.schema import LossScaleConfig


class LossScale:
    """A power of two: the loss is multiplied by it before backward, the float32 gradients are divided by it after.

    float16 rounds values below 6e-8 to zero and has none above 65504. Dividing by a power of two is exact, so the scale
    changes no gradient within these limits. An overflow halves the scale (to 1 at least); `growth_steps` applied steps
    in a row double it.
    """

    def __init__(self, settings: LossScaleConfig) -> None:
        self.value = settings.initial
        self._growth_steps, self._applied = settings.growth_steps, 0

    def update(self, *, applied: bool) -> None:
        """Take note of one optimizer step: whether its gradients were finite and it was applied."""
        if not applied:
            self.value, self._applied = max(1, self.value // 2), 0
            return
        self._applied += 1
        if self._applied == self._growth_steps:
            self.value, self._applied = self.value * 2, 0

    def counters(self) -> dict[str, int]:
        """State for a checkpoint."""
        return {"loss_scale": self.value, "loss_scale_applied": self._applied}

    def restore(self, counters: Mapping[str, int]) -> None:
        """Go on after `counters`; a checkpoint of a run in another dtype holds none, and the initial scale stays."""
        self.value = counters.get("loss_scale", self.value)
        self._applied = counters.get("loss_scale_applied", self._applied)


def loss_scale_of(dtype: str, settings: LossScaleConfig) -> LossScale | None:
    """A loss scale where the learner's `dtype` needs one."""
    return LossScale(settings) if dtype == "float16" else None
