"""Models and parallel layouts that this learner accepts. Runs before anything is loaded and imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_trm.config.choices import replay_mode
from moe_trm.config.schema import Config, ParallelConfig
from moe_trm.errors import CheckpointError, ConfigError
from moe_trm.learner.dense import check_routes
from moe_trm.learner.lora.targets import check_lora
from moe_trm.learner.megatron.fp8 import check_shapes
from moe_trm.learner.megatron.stages import stages
from moe_trm.models.family import Family
from moe_trm.models.hf_config import expert_width, moe_layers, num_experts
from moe_trm.models.registry import FAMILIES, family_of


def check_layout(
    config: Config, megatron_version: str, hf_config: Mapping[str, Any], *, world_size: int | None = None
) -> None:
    """Refuse what this model or this Megatron-Core cannot do, or is not known to do, with the reason.

    Raises:
        ConfigError: a layout or combination that is refused.
        CheckpointError: a model this learner does not support.
    """
    parallel, where = config.learner.parallel, f"{config.model.checkpoint}/config.json"
    family = family_of(hf_config, where)
    _check_model(family, where, parallel, hf_config, exact=config.exact)
    replay = replay_mode(config.learner, config.replay, config.pipeline, config.correction)
    check_routes(replay, config.loss, config.probe.every, family.architecture, is_moe=bool(moe_layers(hf_config)))
    _check_known_wrong(parallel, megatron_version, bool(moe_layers(hf_config)))
    _check_divisibility(parallel, hf_config, world_size)
    check_shapes(config.learner, hf_config)
    check_lora(config.learner, hf_config)


def _check_model(
    family: Family, where: str, parallel: ParallelConfig, hf_config: Mapping[str, Any], *, exact: bool
) -> None:
    if family.not_in_megatron:
        raise CheckpointError(
            "Megatron-Core's learner has no such layers",
            where=where,
            got=f"{family.architecture}: {family.not_in_megatron}",
            expected="a family that docs/models.md has for Megatron-Core",
            fix="Set learner.backend=deepspeed.",
        )
    rope = hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in family.rotations:
        raise CheckpointError(
            "position scaling is not supported",
            where=where,
            got=f"rope_type={kind}",
            expected=" or ".join(family.rotations),
            fix="Use a checkpoint with another position embedding, or learner.backend=deepspeed.",
        )
    if rope.get("attention_factor") is not None:
        raise CheckpointError(
            "position scaling is not supported",
            where=where,
            got=f"attention_factor={rope['attention_factor']}",
            expected="none, so that it follows from the scaling factor",
            fix="Use a checkpoint with another position embedding, or learner.backend=deepspeed.",
        )
    for key, required in family.required.items():
        if hf_config.get(key, required.value) != required.value:
            raise CheckpointError(
                "model option is not supported",
                where=f"{where}, {key}",
                got=f"{hf_config[key]}: {required.why}",
                expected=required.value,
                fix=(
                    "Use a checkpoint without this option, or learner.backend=deepspeed, which trains the model as "
                    "transformers has it."
                ),
            )
    _check_groups(where, hf_config)
    _check_single_expert(where, family, hf_config)
    if exact and not family.exact:
        raise ConfigError(
            "this model has not been made to compute alike in both engines",
            where="config key exact",
            got=f"true with {family.architecture}",
            expected=" or ".join(sorted(candidate.architecture for candidate in FAMILIES.values() if candidate.exact)),
            fix="Set exact=false. rollout.server.dtype=float32 leaves the least rounding on a CPU.",
        )
    if family.whole_qk_norms and parallel.tensor > 1:
        raise ConfigError(
            f"{family.name} norms the queries of all heads together, and the keys: tensor-parallel ranks hold some "
            "heads each",
            where="learner.parallel.tensor",
            got=parallel.tensor,
            expected=1,
            fix="Use learner.parallel.expert, pipeline or context.",
        )
    if family.expert_biases and parallel.expert_tensor > 1:
        raise ConfigError(
            f"an expert of {family.name} has biases, which each rank that shares its matrices would add",
            where="learner.parallel.expert_tensor",
            got=parallel.expert_tensor,
            expected=1,
            fix="Use learner.parallel.expert.",
        )


def _check_single_expert(where: str, family: Family, hf_config: Mapping[str, Any]) -> None:
    """Refuse one expert per token whose weight is a softmax over that expert alone: it is always 1."""
    options = family.megatron(hf_config)
    softmax = options.get("moe_router_score_function", "softmax") == "softmax"
    single = bool(moe_layers(hf_config)) and hf_config.get("num_experts_per_tok") == 1
    if single and softmax and not options.get("moe_router_pre_softmax", False):
        raise CheckpointError(
            "one expert per token with a normalised weight, which is always 1: its router has no gradient, and "
            "Megatron-Core refuses it",
            where=f"{where}, num_experts_per_tok",
            got=1,
            expected="at least 2, or weights of a softmax over all experts (norm_topk_prob=false)",
            fix="Set learner.backend=deepspeed, which trains the other weights as transformers does.",
        )


def _check_groups(where: str, hf_config: Mapping[str, Any]) -> None:
    """Refuse expert groups that Megatron chooses by another rule.

    Transformers adds the best two scores of each group.
    """
    groups, top_k = int(hf_config.get("n_group") or 1), int(hf_config.get("num_experts_per_tok") or 0)
    if groups > 1 and top_k // int(hf_config["topk_group"]) != 2:
        raise CheckpointError(
            "expert groups are chosen by another rule in Megatron-Core",
            where=f"{where}, topk_group",
            got=f"num_experts_per_tok={top_k}, topk_group={hf_config['topk_group']}",
            expected="num_experts_per_tok // topk_group = 2",
            fix=(
                "Set learner.backend=deepspeed: Megatron-Core adds up that many scores of a group, the model the best "
                "two."
            ),
        )


def _check_known_wrong(parallel: ParallelConfig, megatron_version: str, is_moe: bool) -> None:
    if (
        is_moe
        and parallel.expert_tensor < parallel.tensor
        and parallel.expert == 1
        and _release(megatron_version) < (0, 17)
    ):
        raise ConfigError(
            "this Megatron-Core does not reduce expert gradients over tensor-parallel ranks",
            where="learner.parallel",
            got=(
                f"tensor={parallel.tensor}, expert_tensor={parallel.expert_tensor}, expert=1 on Megatron-Core "
                f"{megatron_version}"
            ),
            expected="expert_tensor equal to tensor, or expert > 1, or Megatron-Core 0.17",
            fix="Gradients would be silently wrong. Change the layout or upgrade.",
        )


def _check_divisibility(parallel: ParallelConfig, hf_config: Mapping[str, Any], world_size: int | None) -> None:
    moe = moe_layers(hf_config)
    for name in ("expert", "expert_tensor"):
        if getattr(parallel, name) > 1 and not moe:
            raise ConfigError(
                "expert parallelism needs a mixture of experts",
                where=f"learner.parallel.{name}",
                got=getattr(parallel, name),
                expected=1,
                fix=f"Set learner.parallel.{name}=1.",
            )
    stages(parallel, int(hf_config["num_hidden_layers"]))
    shares: list[tuple[str, int, str, int]] = [
        ("tensor", parallel.tensor, "attention heads", int(hf_config["num_attention_heads"])),
        ("tensor", parallel.tensor, "key/value heads", int(hf_config["num_key_value_heads"])),
        ("tensor", parallel.tensor, "columns of the dense layers", int(hf_config.get("intermediate_size") or 0)),
    ]
    if moe:
        width = expert_width(hf_config)
        shares.append(("expert", parallel.expert, "experts", num_experts(hf_config)))
        shares.append(("expert_tensor", parallel.expert_tensor, "columns of an expert", width))
    if world_size is not None:
        dense = parallel.tensor * parallel.pipeline * parallel.context
        shares.append(("tensor * pipeline * context", dense, "learner ranks", world_size))
        expert = parallel.expert_tensor * parallel.expert * parallel.pipeline
        shares.append(("expert_tensor * expert * pipeline", expert, "learner ranks", world_size))
    for name, size, what, number in shares:
        if number % size:
            raise ConfigError(
                f"{what} do not divide over the ranks",
                where=f"learner.parallel.{name}",
                got=f"{number} {what}, {size} ranks",
                expected=f"a divisor of {number}",
                fix="Choose other sizes in learner.parallel, or start torchrun with another --nproc-per-node.",
            )


def _release(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)
