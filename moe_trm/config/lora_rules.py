"""Rules between `learner.lora` and other settings.

What needs the model's names is in `moe_trm.learner.lora.targets`.
"""

from __future__ import annotations

from collections.abc import Iterator

from moe_trm.config.problems import Problem
from moe_trm.config.schema import LearnerConfig, LoraConfig, ProbeConfig, RolloutConfig

ROUTER = "router"


def refusals(learner: LearnerConfig) -> Iterator[Problem]:
    """Settings under which adapters would not train, or would train something else."""
    lora = learner.lora
    if not lora.rank:
        return
    rank = f"learner.lora.rank={lora.rank}"
    if not lora.targets:
        yield Problem(
            "learner.lora.targets",
            "without a matrix to adapt nothing trains",
            got=f"none with {rank}",
            expected="attention, experts, router, or names of modules",
        )
    if learner.backend == "megatron" and learner.transformer_engine == "on":
        yield Problem(
            "learner.transformer_engine",
            "adapters are merged into Megatron's own layers: those of Transformer Engine keep and fuse their weights",
            got=f"on with {rank}",
            expected="off or auto, which is off then",
        )
    if learner.fp8 != "none":
        yield Problem(
            "learner.fp8",
            "8-bit products are Transformer Engine's, whose layers take no adapters",
            got=f"{learner.fp8} with {rank}",
            expected="none",
        )
    if learner.round_like_rollout:
        yield Problem(
            "learner.round_like_rollout",
            "it would round W, A and B one by one, where the rollout rounds W + (alpha / rank) B A",
            got=f"true with {rank}",
            expected="false",
            fix="give both engines one dtype (learner.dtype, rollout.server.dtype): then a push rounds nothing",
        )
    if learner.freeze_router and ROUTER in lora.targets:
        yield Problem(
            "learner.freeze_router",
            "the routers are to stay, and to have adapters",
            got=f"true with {ROUTER} in learner.lora.targets",
            expected="one of the two",
        )


def idle_settings(learner: LearnerConfig) -> Iterator[str]:
    """Keys that were set without adapters, or that adapters make idle."""
    if not learner.lora.rank:
        for name in LoraConfig.model_fields:
            if name != "rank" and name in learner.lora.model_fields_set:
                yield f"learner.lora.{name} has no effect: learner.lora.rank=0"
    elif "freeze_router" in learner.model_fields_set and ROUTER not in learner.lora.targets:
        yield (
            f"learner.freeze_router has no effect: with learner.lora.rank={learner.lora.rank} every weight of the "
            "checkpoint stays, and no router has an adapter"
        )


def surprises(learner: LearnerConfig, rollout: RolloutConfig, probe: ProbeConfig) -> Iterator[str]:
    """Measurements that there are not with adapters."""
    narrows = learner.dtype == "float32" != rollout.server.dtype
    if learner.lora.rank and probe.every and (narrows or rollout.fake_quantization is not None):
        yield (
            f"probe/cast_k3_kl and its like are not measured with learner.lora.rank={learner.lora.rank}: copies of "
            "weights are of A and B alone, and cannot be rounded as the sum is"
        )
