"""Policy losses by name. A new one is a file and a test."""

from __future__ import annotations

from importlib import import_module

from moe_trm.losses.aggregate import Aggregation, aggregate
from moe_trm.losses.inputs import LossInputs, TokenLoss
from moe_trm.losses.loss import BoundLoss, Loss
from moe_trm.methods.losses import LOSSES
from moe_trm.methods.own import is_own, load_own
from moe_trm.methods.parameters import unknown

__all__ = ["Aggregation", "BoundLoss", "Loss", "LossInputs", "TokenLoss", "aggregate", "get", "names"]


def names() -> tuple[str, ...]:
    """The built-in losses, sorted."""
    return tuple(sorted(LOSSES))


def get(name: str) -> Loss:
    """The loss called `name`: a built-in one, or the user's own under `@loss`, `path/to/file.py:function`.

    Raises:
        ConfigError: an unknown name, with the nearest one, or a function that cannot be loaded or is no loss.
    """
    if is_own(name):
        decorator, source = '@loss(aggregation="token-mean")', "moe_trm.losses.loss"
        return load_own(name, Loss, LOSSES, what="loss", key="loss.name", decorator=decorator, source=source)
    if name not in LOSSES:
        raise unknown("loss", name, LOSSES, "loss.name")
    built_in: Loss = getattr(import_module(f"moe_trm.losses.{LOSSES[name].module}"), name)
    return built_in
