"""Adapters that a run asks for: which matrices, and what their factors start as."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moe_trm.config.schema import LearnerConfig, LoraConfig
from moe_trm.learner.hf_checkpoint import HfCheckpoint
from moe_trm.learner.lora.adapter import A, AdapterStart, B, factor_name
from moe_trm.learner.lora.files import read_adapter
from moe_trm.learner.lora.targets import adapted_modules, modules_of


@dataclass(frozen=True)
class WantedAdapters:
    """The adapters of a whole model: the Hugging Face modules that have one, rank and scale, and their first values."""

    modules: frozenset[str]
    lora: LoraConfig
    start: AdapterStart

    @property
    def factor_names(self) -> frozenset[str]:
        """Names of everything that trains."""
        return frozenset(factor_name(module, factor) for module in self.modules for factor in (A, B))


def requested_adapters(
    learner: LearnerConfig, seed: int, hf: Mapping[str, Any], checkpoint: HfCheckpoint
) -> WantedAdapters | None:
    """The adapters of this run; None where the weights themselves train.

    Raises:
        ConfigError: a target that no matrix has.
        CheckpointError: an adapter to start from that is not one of this run's.
    """
    lora = learner.lora
    if not lora.rank:
        return None
    modules = adapted_modules(modules_of(hf, checkpoint.names), lora, hf)
    start = None if lora.adapter is None else read_adapter(lora.adapter, lora, modules, checkpoint)
    return WantedAdapters(modules, lora, AdapterStart(lora.rank, seed, start))
