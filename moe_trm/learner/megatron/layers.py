"""Choice of the transformer layers to build on this machine.

Transformer Engine's where CUDA is present and it imports, Megatron's local layers on other CUDA machines, our CPU
layers elsewhere.
"""

from __future__ import annotations

from typing import Literal

import torch

from moe_trm.config.choices import layers_switch
from moe_trm.config.schema import LearnerConfig
from moe_trm.errors import ConfigError

Layers = Literal["transformer_engine", "local", "cpu"]


def layers_here(learner: LearnerConfig) -> Layers:
    """Layers that this machine builds under these settings. Raises `ConfigError` as `choose_layers` does."""
    cuda = torch.cuda.is_available()
    usable = cuda and learner.transformer_engine != "off" and transformer_engine_imports()
    return choose_layers(learner, cuda=cuda, transformer_engine=usable)


def choose_layers(learner: LearnerConfig, *, cuda: bool, transformer_engine: bool) -> Layers:
    """Choose the layers to build, given whether there is a device, and whether `transformer_engine.pytorch` imports.

    Raises `ConfigError` where a setting needs Transformer Engine, which cannot be used here.
    """
    switch, _ = layers_switch(learner, cuda=cuda, transformer_engine=lambda: transformer_engine)
    if switch == "on":
        if not (cuda and transformer_engine):
            raise ConfigError(
                "Transformer Engine cannot be used here",
                where="learner.transformer_engine",
                got="transformer_engine.pytorch does not import" if cuda else "no CUDA device",
                expected="a CUDA device and a working Transformer Engine",
                fix="Set learner.transformer_engine=auto and learner.fp8=none"
                + (", or install transformer-engine[pytorch] for this CUDA version." if cuda else "."),
            )
        return "transformer_engine"
    layers: Layers = "local" if cuda else "cpu"
    if layers == "local" and learner.parallel.context > 1:
        raise ConfigError(
            "context parallelism on CUDA needs Transformer Engine",
            where="learner.parallel.context",
            got=f"{learner.parallel.context} with learner.transformer_engine={switch}"
            + ("" if transformer_engine else ", and transformer_engine.pytorch does not import"),
            expected="Transformer Engine, or 1",
            fix="Install transformer-engine for this CUDA version, or share sequences with learner.parallel.tensor.",
        )
    return layers


def transformer_engine_imports() -> bool:
    """True when `transformer_engine.pytorch` can be imported; called only where CUDA is present."""
    try:
        import transformer_engine.pytorch  # type: ignore[import-not-found]  # noqa: F401
    # A broken installation raises RuntimeError or OSError.
    except Exception:  # noqa: BLE001 (any error means "not usable")
        return False
    return True
