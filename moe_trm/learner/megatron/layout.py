"""Which models and parallel layouts this learner accepts. Runs before anything is loaded and imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_trm.config.schema import Config, ParallelConfig
from moe_trm.errors import CheckpointError, ConfigError
from moe_trm.learner.hf_config import moe_layers, num_experts

ARCHITECTURES = ("Qwen3MoeForCausalLM", "Qwen3ForCausalLM")
_DP_ONLY = "Leave it at 1 and use learner.parallel.expert and more ranks."


def check_layout(
    config: Config, megatron_version: str, hf_config: Mapping[str, Any], *, world_size: int | None = None
) -> None:
    """Refuse what cannot work, or is not known to work, with the reason.

    Args:
        config: the whole run.
        megatron_version: of the installed Megatron-Core, e.g. "0.16.1".
        hf_config: of the checkpoint (`read_hf_config`).
        world_size: number of learner ranks, when it is known.

    Raises:
        ConfigError: a layout or combination that is refused.
        CheckpointError: a model this learner does not support.
    """
    _check_model(config, hf_config)
    parallel = config.learner.parallel
    _check_known_wrong(parallel, megatron_version, bool(moe_layers(hf_config)))
    _check_not_validated(parallel)
    _check_divisibility(parallel, hf_config, world_size)


def _check_model(config: Config, hf_config: Mapping[str, Any]) -> None:
    where = f"{config.model.checkpoint}/config.json"
    architectures = hf_config.get("architectures") or []
    if len(architectures) != 1 or architectures[0] not in ARCHITECTURES:
        raise CheckpointError(
            "model architecture is not supported",
            where=where,
            got=architectures,
            expected=f"one of {', '.join(ARCHITECTURES)}",
            fix="Use a Qwen3-MoE checkpoint.",
        )
    if hf_config.get("num_nextn_predict_layers") or hf_config.get("mtp_num_hidden_layers"):
        raise CheckpointError(
            "multi-token-prediction layers are not supported",
            where=where,
            got="MTP layers",
            expected="none",
            fix="Use a checkpoint without MTP layers: their routers have no recorded routes.",
        )
    rope = hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise CheckpointError(
            "position scaling is not supported",
            where=where,
            got=f"rope_type={kind}",
            expected="default",
            fix="Use a checkpoint without rope scaling.",
        )
    for key, wanted in (("hidden_act", "silu"), ("attention_bias", False), ("use_sliding_window", False)):
        if hf_config.get(key, wanted) != wanted:
            raise CheckpointError(
                "model option is not supported",
                where=f"{where}, {key}",
                got=hf_config[key],
                expected=wanted,
                fix="Use a checkpoint with the plain Qwen3 layers.",
            )
    if config.replay.mode != "none" and not moe_layers(hf_config):
        raise ConfigError(
            "routing replay needs a mixture of experts",
            where="replay.mode",
            got=f"{config.replay.mode} with {architectures[0]}, which has no MoE layer",
            expected="none",
            fix="Set replay.mode=none or use a MoE checkpoint.",
        )


def _check_known_wrong(parallel: ParallelConfig, megatron_version: str, is_moe: bool) -> None:
    where = "learner.parallel"
    if (
        is_moe
        and parallel.tensor > 1
        and parallel.expert_tensor == 1
        and parallel.expert == 1
        and _release(megatron_version) < (0, 17)
    ):
        raise ConfigError(
            "this Megatron-Core does not reduce expert gradients over tensor-parallel ranks",
            where=where,
            got=f"tensor={parallel.tensor}, expert_tensor=1, expert=1 on Megatron-Core {megatron_version}",
            expected="expert_tensor equal to tensor, or expert > 1, or Megatron-Core 0.17",
            fix="Gradients would be silently wrong. Change the layout or upgrade.",
        )
    if parallel.virtual_pipeline is not None and parallel.pipeline < 2:
        raise ConfigError(
            "virtual pipeline stages need a pipeline",
            where=where,
            got=f"virtual_pipeline={parallel.virtual_pipeline}, pipeline={parallel.pipeline}",
            expected="pipeline >= 2",
            fix="Remove learner.parallel.virtual_pipeline.",
        )
    if parallel.virtual_pipeline is not None and parallel.pipeline == 2:
        raise ConfigError(
            "two pipeline stages with virtual stages give wrong gradients without overlapped transfers",
            where=where,
            got=f"pipeline=2, virtual_pipeline={parallel.virtual_pipeline}, transfers not overlapped",
            expected="virtual_pipeline unset, or pipeline >= 4",
            fix="Remove learner.parallel.virtual_pipeline.",
        )


def _check_not_validated(parallel: ParallelConfig) -> None:
    reasons = {
        "tensor": "MoE layers then need sequence parallelism, which is not yet validated with replay in this version",
        "expert_tensor": "it is not yet validated in this version",
        "context": "it needs packed attention, which is not yet validated in this version",
        "pipeline": "log-probs would have to travel between stages, which is not yet validated in this version",
    }
    for name, reason in reasons.items():
        size = getattr(parallel, name)
        if size > 1:
            raise ConfigError(
                f"this parallel layout is refused: {reason}",
                where=f"learner.parallel.{name}",
                got=size,
                expected=1,
                fix=_DP_ONLY,
            )


def _check_divisibility(parallel: ParallelConfig, hf_config: Mapping[str, Any], world_size: int | None) -> None:
    where = "learner.parallel.expert"
    if parallel.expert > 1 and not moe_layers(hf_config):
        raise ConfigError(
            "expert parallelism needs a mixture of experts",
            where=where,
            got=parallel.expert,
            expected=1,
            fix="Set learner.parallel.expert=1.",
        )
    if parallel.expert > 1 and num_experts(hf_config) % parallel.expert:
        raise ConfigError(
            "experts do not divide over expert-parallel ranks",
            where=where,
            got=f"{num_experts(hf_config)} experts over {parallel.expert} ranks",
            expected="a divisor of the number of experts",
            fix="Choose another learner.parallel.expert.",
        )
    if world_size is not None and world_size % parallel.expert:
        raise ConfigError(
            "ranks do not divide into expert-parallel groups",
            where=where,
            got=f"{world_size} ranks, expert={parallel.expert}",
            expected="a number of ranks that learner.parallel.expert divides",
            fix="Start torchrun with another --nproc-per-node.",
        )


def _release(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)
