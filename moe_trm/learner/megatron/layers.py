"""Which transformer layers to build on this machine.

Transformer Engine's where CUDA is present and it imports, Megatron's local layers on other CUDA machines, our CPU layers elsewhere.
"""

from __future__ import annotations

from typing import Literal

from moe_trm.errors import ConfigError

Layers = Literal["transformer_engine", "local", "cpu"]


def choose_layers(*, cuda: bool, transformer_engine: bool) -> Layers:
    """Which layers to build from what this machine has."""
    if not cuda:
        return "cpu"
    return "transformer_engine" if transformer_engine else "local"


def check_context(layers: Layers, context: int) -> None:
    """Raise `ConfigError` when these layers cannot attend over the columns of other ranks."""
    if layers == "local" and context > 1:
        raise ConfigError(
            "context parallelism on CUDA needs Transformer Engine",
            where="learner.parallel.context",
            got=f"{context}, and transformer_engine.pytorch does not import",
            expected="Transformer Engine, or 1",
            fix="Install transformer-engine for this CUDA version, or share sequences with learner.parallel.tensor.",
        )


def transformer_engine_imports() -> bool:
    """Whether `transformer_engine.pytorch` can be imported; asked only where CUDA is present."""
    try:
        import transformer_engine.pytorch  # type: ignore[import-not-found]  # noqa: F401
    except Exception:  # noqa: BLE001 - a broken installation raises RuntimeError or OSError, and any of them means "not usable"
        return False
    return True
