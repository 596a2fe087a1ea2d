"""DeepSpeed's optimizer step, guarded: warm-up, and no step on gradients that are not finite."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from moe_trm.config.schema import OptimizerConfig
from moe_trm.learner.protocol import UpdateResult


def adamw(model: nn.Module, settings: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over the trainable parameters of `model`, with weight decay on matrices only."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": matrices, "weight_decay": decay}
        for matrices, decay in (
            ([parameter for parameter in trained if parameter.dim() > 1], settings.weight_decay),
            ([parameter for parameter in trained if parameter.dim() <= 1], 0.0),
        )
        if matrices
    ]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps)


class GuardedOptimizer:
    """Step `t` (from 0) uses `lr * min(1, (t + 1) / warmup_steps)`; a step refused for non-finite gradients does not advance `t`.

    Args:
        engine: DeepSpeed's engine, which clips by the global norm and refuses non-finite gradients on all ranks alike.
        settings: of the run.
    """

    def __init__(self, engine: Any, settings: OptimizerConfig) -> None:
        self._engine, self._settings = engine, settings
        self.steps = 0
        """Steps that were applied."""

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        warmup = self._settings.warmup_steps
        return self._settings.lr * min(1.0, (self.steps + 1) / warmup) if warmup else self._settings.lr

    def step(self) -> UpdateResult:
        """Apply the accumulated gradients, unless their norm is not finite, and forget them."""
        lr = self.lr
        for group in self._engine.optimizer.param_groups:
            group["lr"] = lr
        self._engine.step()
        applied = bool(self._engine.was_step_applied())
        self.steps += int(applied)
        return UpdateResult(grad_norm=float(self._engine.get_global_grad_norm()), lr=lr, applied=applied)
