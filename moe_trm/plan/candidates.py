"""The configured layout of the learner, and others that the layout rules accept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from math import ceil
from typing import Any

from moe_trm.config.schema import Config, ParallelConfig
from moe_trm.errors import CheckpointError, ConfigError
from moe_trm.learner.dense import check_routes
from moe_trm.learner.megatron.layout import check_layout
from moe_trm.learner.megatron.stages import balanced, layers_by_rank
from moe_trm.models.hf_config import moe_layers, num_experts
from moe_trm.plan.kept import BYTES, keeps_scores
from moe_trm.plan.memory import Load, MemoryKind, deepspeed_memory, megatron_memory
from moe_trm.plan.parameters import Model
from moe_trm.plan.speed import bubble, micro_batches

DEEPEST = 32
"""Pipeline ranks of a candidate, at most."""
PINNED_MEGATRON = "0.16.1"
"""The Megatron-Core that the rules judge where none is installed."""


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
    """

    parallel: ParallelConfig
    recompute: str
    stage: int
    memory: Mapping[MemoryKind, float]
    waiting: float
    layers: tuple[int, ...] = ()
    trained: float = 0.0

    @property
    def spread(self) -> str:
        """Layers of a pipeline rank: `12`, or `11-12` where they differ."""
        return "-".join(str(number) for number in sorted({min(self.layers), max(self.layers)}))

    @property
    def total(self) -> float:
        """Bytes of a rank."""
        return sum(self.memory.values())


def judge(config: Config, model: Model, hf: Mapping[str, Any], load: Load, step_tokens: float) -> Judged:
    """The configured layout. Raises `ConfigError` or `CheckpointError` with the reason of the layout rules."""
    learner = config.learner
    load = replace(load, micro_batches=ceil(micro_batches(config.learner, config.rollout, step_tokens, load.world)))
    if learner.backend == "deepspeed":
        check_routes(config, str(hf.get("architectures")), is_moe=bool(moe_layers(hf)))
        stage, memory = deepspeed_memory(model, hf, learner, load)
    else:
        check_layout(config, megatron_version(), hf, world_size=load.world)
        stage, memory = megatron_memory(model, hf, learner, load)
    waiting = bubble(config.learner, config.rollout, len(model.layers), step_tokens, load.world)
    layers = tuple(len(own) for own in layers_by_rank(learner.parallel, len(model.layers)))
    # Gradients have 4 bytes for each number that trains, shared as these are at stages 2 and 3 of ZeRO.
    trained = BYTES[learner.dtype] * memory["gradients"] / 4 if learner.lora.rank else memory["weights"]
    return Judged(learner.parallel, learner.recompute, stage, memory, waiting, layers, trained)


def alternatives(
    config: Config, model: Model, hf: Mapping[str, Any], load: Load, step_tokens: float, room: float, node_gpus: int
) -> list[Judged]:
    """Layouts that the rules accept and that `room` bytes hold, the best first.

    Better is: experts shared within a node, less waiting between pipeline stages, fewer ranks for one sequence, fewer
    ranks for one copy of the experts, less memory.
    """
    if config.learner.backend == "deepspeed":
        return []
    found = []
    for candidate in _candidates(config, hf, load.world, node_gpus):
        try:
            judged = judge(candidate, model, hf, load, step_tokens)
        except (ConfigError, CheckpointError):
            continue
        if judged.total <= room:
            found.append(judged)

    def cost(judged: Judged) -> tuple[float, ...]:
        sizes = judged.parallel
        apart = sizes.expert * sizes.expert_tensor > node_gpus
        return (apart, round(judged.waiting, 2), sizes.tensor * sizes.context, sizes.expert, judged.total)

    return sorted(found, key=cost)


def _candidates(config: Config, hf: Mapping[str, Any], world: int, node_gpus: int) -> Iterator[Config]:
    powers = [2**power for power in range(10)]
    tensors = [size for size in powers if size <= node_gpus and world % size == 0]
    experts = [size for size in powers if size <= world and num_experts(hf) % size == 0] if moe_layers(hf) else [1]
    pipelines = _pipelines(int(hf["num_hidden_layers"]), world)
    # Sharing sequences on GPUs needs the layers of Transformer Engine.
    contexts = (1,) if keeps_scores(config.learner) else (1, 2, 4)
    for tensor, pipeline, context, expert in product(tensors, pipelines, contexts, experts):
        yield with_parallel(config, ParallelConfig(tensor=tensor, context=context, expert=expert, **pipeline))


def _pipelines(num_layers: int, world: int) -> list[dict[str, Any]]:
    """Settings of pipelines of `world` ranks; with a layout as even as can be where the layers do not divide."""
    found: list[dict[str, Any]] = []
    for size in range(1, min(DEEPEST, num_layers) + 1):
        if world % size == 0:
            uneven = {"pipeline_layout": balanced(num_layers, size)} if num_layers % size else {}
            found.append({"pipeline": size, **uneven})
    return found


def with_parallel(config: Config, parallel: ParallelConfig) -> Config:
    """`config` with another layout."""
    return config.model_copy(update={"learner": config.learner.model_copy(update={"parallel": parallel})})


@cache
def megatron_version() -> str:
    """Version of the installed Megatron-Core, or the one this project pins."""
    try:
        return version("megatron-core")
    except PackageNotFoundError:
        return PINNED_MEGATRON
