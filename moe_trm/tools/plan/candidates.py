"""A layout of the learner, judged by its rules and its memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from math import ceil
from typing import Any

from moe_trm.config.schema import Config, ParallelConfig
from moe_trm.learner.model_rules import check_trained
from moe_trm.tools.plan.kept import BYTES
from moe_trm.tools.plan.memory import Load, MemoryKind, deepspeed_memory, megatron_memory, stepped_elements
from moe_trm.tools.plan.parameters import Model
from moe_trm.tools.plan.speed import bubble, layers_of, micro_batches

PINNED_MEGATRON = "0.19.2"
"""The Megatron-Core of GPUs, which the rules judge where none is installed."""


@dataclass(frozen=True)
class Judged:
    """A layout with what it needs.

    Attributes:
        parallel: its sizes.
        recompute: `learner.recompute`.
        stage: the pipeline stage whose ranks need most memory.
        memory: bytes by kind, on a rank of that stage.
        waiting: share of a minibatch in which pipeline ranks wait for each other.
        layers: of each pipeline rank.
        trained: bytes of the weights of such a rank that train: adapters alone, where there are any.
        stepped: numbers that the optimizer of such a rank steps.
    """

    parallel: ParallelConfig
    recompute: str
    stage: int
    memory: Mapping[MemoryKind, float]
    waiting: float
    layers: tuple[int, ...] = ()
    trained: float = 0.0
    stepped: float = 0.0

    @property
    def spread(self) -> str:
        """Layers of a pipeline rank: `12`, or `11-12` where they differ."""
        return "-".join(str(number) for number in sorted({min(self.layers), max(self.layers)}))

    @property
    def total(self) -> float:
        """Bytes of a rank."""
        return sum(self.memory.values())

    @property
    def resident(self) -> float:
        """Bytes that stay while nothing is trained."""
        return sum(
            self.memory.get(kind, 0.0) for kind in ("weights", "vision tower", "gradients", "optimizer", "other")
        )


def judge(config: Config, model: Model, hf: Mapping[str, Any], load: Load, step_tokens: float, where: str) -> Judged:
    """The configured layout. Raises `ConfigError` or `CheckpointError` as a start does (`check_trained`)."""
    learner = config.learner
    load = replace(load, micro_batches=ceil(micro_batches(config.learner, config.rollout, step_tokens, load.world)))
    check_trained(config, hf, where, megatron=megatron_version(), world_size=load.world)
    if learner.backend == "deepspeed":
        stage, memory = deepspeed_memory(model, hf, learner, load)
    else:
        stage, memory = megatron_memory(model, hf, learner, load)
    waiting = bubble(config.learner, config.rollout, len(model.layers), step_tokens, load.world)
    layers = tuple(len(stage_layers) for stage_layers in layers_of(learner.parallel, len(model.layers)))
    # Gradients have 4 bytes for each number that trains, shared as these are at stages 2 and 3 of ZeRO.
    trained = BYTES[learner.dtype] * memory["gradients"] / 4 if learner.lora.rank else memory["weights"]
    stepped = stepped_elements(model, learner, load.world, stage)
    return Judged(learner.parallel, learner.recompute, stage, memory, waiting, layers, trained, stepped)


@cache
def megatron_version() -> str:
    """Version of the installed Megatron-Core, or the one this project pins."""
    try:
        return version("megatron-core")
    except PackageNotFoundError:
        return PINNED_MEGATRON
