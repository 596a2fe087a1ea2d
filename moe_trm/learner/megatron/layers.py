"""Choice of the transformer layers to build on this machine.

Transformer Engine's where CUDA is present and it imports, Megatron's local layers on other CUDA machines, our CPU
layers elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch

from moe_trm.config.choices import layers_switch
from moe_trm.config.schema import LearnerConfig
from moe_trm.errors import ConfigError
from moe_trm.models.registry import family_of

Layers = Literal["transformer_engine", "local", "cpu"]


def layers_here(learner: LearnerConfig, hf_config: Mapping[str, Any]) -> Layers:
    """Layers that this machine builds for the model of config.json. Raises `ConfigError` as `choose_layers` does."""
    cuda = torch.cuda.is_available()
    is_asked = cuda and learner.transformer_engine != "off"
    problem = transformer_engine_problem() if is_asked else "it is switched off"
    return choose_layers(learner, hf_config, cuda=cuda, problem=problem)


def choose_layers(learner: LearnerConfig, hf_config: Mapping[str, Any], *, cuda: bool, problem: str) -> Layers:
    """Choose the layers to build, given whether there is a device, and why Transformer Engine cannot be used, if so.

    Raises `ConfigError` where a setting or the model needs Transformer Engine, which cannot be used here.
    """
    switch, _ = layers_switch(learner, cuda=cuda, problem=lambda: problem)
    if switch == "on":
        if not cuda or problem:
            raise ConfigError(
                "Transformer Engine cannot be used here",
                where="learner.transformer_engine",
                got=problem if cuda else "no CUDA device",
                expected="a CUDA device and a working Transformer Engine",
                fix="Set learner.transformer_engine=auto and learner.fp8=none"
                + (", or install transformer-engine[pytorch] for this CUDA version." if cuda else "."),
            )
        return "transformer_engine"
    if not cuda:
        return "cpu"
    without = f"learner.transformer_engine={switch}" + (f", {problem}" if problem else "")
    if learner.parallel.context > 1:
        raise ConfigError(
            "context parallelism on CUDA needs Transformer Engine",
            where="learner.parallel.context",
            got=f"{learner.parallel.context} with {without}",
            expected="Transformer Engine, or 1",
            fix="Install transformer-engine for this CUDA version, or share sequences with learner.parallel.tensor.",
        )
    family = family_of(hf_config, "config.json")
    if "latent" in family.attention_kinds(hf_config):
        raise ConfigError(
            "latent attention on CUDA needs Transformer Engine: Megatron's own attention has one size for the heads of "
            "keys and of values",
            where="learner.transformer_engine",
            got=f"{family.name} with {without}",
            expected="a working Transformer Engine",
            fix="Install transformer-engine for this CUDA version (docs/install.md), or set learner.backend=deepspeed.",
        )
    return "local"


def transformer_engine_problem() -> str:
    """The error of importing `transformer_engine.pytorch`, in its own words; empty where it imports.

    Called only where CUDA is present.
    """
    try:
        import transformer_engine.pytorch  # type: ignore[import-not-found]  # noqa: F401
    # A broken installation raises RuntimeError or OSError.
    except Exception as error:  # noqa: BLE001 (any error means "not usable")
        return f"transformer_engine.pytorch does not import: {error}"
    return ""
