"""Rules between `learner.backend=deepspeed` and the settings of the other learner."""

from __future__ import annotations

from collections.abc import Iterator

from moe_trm.config.pipeline_layout import UNEVEN
from moe_trm.config.problems import Problem
from moe_trm.config.schema import DeepSpeedConfig, LearnerConfig, OptimizerConfig, ParallelConfig

_REASONS = {
    "tensor": "ZeRO shards what is kept, never a matrix product",
    "pipeline": "every rank computes all layers",
    "virtual_pipeline": "there are no pipeline stages to cut further",
    **dict.fromkeys(UNEVEN, "every rank computes all layers, and there are no pipeline stages"),
    "context": "every rank computes whole sequences",
    "expert": "every rank computes all experts; memory is saved by learner.deepspeed.zero_stage",
    "expert_tensor": "ZeRO shards what is kept, never a matrix product",
}


def refusals(learner: LearnerConfig, optimizer: OptimizerConfig) -> Iterator[Problem]:
    """Settings that only Megatron-Core can follow, and those that this DeepSpeed would follow differently."""
    if learner.backend != "deepspeed":
        return
    for name, reason in _REASONS.items():
        value, default = getattr(learner.parallel, name), ParallelConfig.model_fields[name].default
        if value != default and (name, value) != ("virtual_pipeline", 1):
            yield Problem(
                f"learner.parallel.{name}",
                f"all ranks of learner.backend=deepspeed are data parallel: {reason}",
                got=str(value),
                expected="left out" if name in UNEVEN else "1",
                fix="leave it out, or set learner.backend=megatron",
            )
    if not learner.distributed_optimizer:
        yield Problem(
            "learner.distributed_optimizer",
            "every ZeRO stage shards the optimizer's state",
            got="false with learner.backend=deepspeed",
            expected="left out",
        )
    if learner.recompute == "selective":
        yield Problem(
            "learner.recompute",
            "the models of transformers recompute whole layers",
            got="selective with learner.backend=deepspeed",
            expected="none or full",
        )
    if learner.dtype == "bfloat16" and learner.deepspeed.zero_stage == 1:
        yield Problem(
            "learner.deepspeed.zero_stage",
            "DeepSpeed trains bfloat16 at stage 1 with another optimizer, whose state cannot be saved with the others'",
            got="1 with learner.dtype=bfloat16",
            expected="2 or 3",
        )
    if optimizer.alignment_limit is not None and learner.deepspeed.zero_stage == 3:
        yield Problem(
            "optimizer.alignment_limit",
            "gradients of ZeRO 3 are not in one place before the step",
            got=f"{optimizer.alignment_limit} with learner.deepspeed.zero_stage=3",
            expected="none, or stage 1 or 2",
        )
    if optimizer.extra:
        yield Problem(
            "optimizer.extra",
            "these are options of Megatron-Core's optimizer",
            got=", ".join(optimizer.extra),
            expected="none with learner.backend=deepspeed",
        )


def idle_settings(learner: LearnerConfig) -> Iterator[str]:
    """Keys that were set for the learner that is not used."""
    if learner.backend == "deepspeed" and learner.distributed_optimizer:
        if "distributed_optimizer" in learner.model_fields_set:
            yield (
                "learner.distributed_optimizer has no effect: "
                "learner.backend=deepspeed shards by learner.deepspeed.zero_stage"
            )
    elif learner.backend != "deepspeed":
        for name in DeepSpeedConfig.model_fields:
            if name in learner.deepspeed.model_fields_set:
                yield f"learner.deepspeed.{name} has no effect: learner.backend={learner.backend}"
