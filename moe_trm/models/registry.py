"""Every family by name, and the one that a config.json belongs to. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_trm.errors import CheckpointError
from moe_trm.models.deepseek_v3 import DEEPSEEK_V3
from moe_trm.models.deepseek_v32 import DEEPSEEK_V32, indexer_types, sparse_attention
from moe_trm.models.family import Family
from moe_trm.models.glm4_moe import GLM4_MOE
from moe_trm.models.glm4_moe_lite import GLM4_MOE_LITE
from moe_trm.models.glm_moe_dsa import GLM_MOE_DSA
from moe_trm.models.gpt_oss import GPT_OSS
from moe_trm.models.minimax_m2 import MINIMAX_M2
from moe_trm.models.mixtral import MIXTRAL
from moe_trm.models.nemotron_h import NEMOTRON_H
from moe_trm.models.olmoe import OLMOE
from moe_trm.models.qwen3 import QWEN3, QWEN3_MOE
from moe_trm.models.qwen3_5_moe import QWEN3_5_MOE
from moe_trm.models.qwen3_next import QWEN3_NEXT

FAMILIES: Mapping[str, Family] = {
    family.name: family
    for family in (
        QWEN3,
        QWEN3_MOE,
        OLMOE,
        MIXTRAL,
        GLM4_MOE,
        DEEPSEEK_V3,
        GLM4_MOE_LITE,
        GPT_OSS,
        MINIMAX_M2,
        QWEN3_NEXT,
        QWEN3_5_MOE,
        DEEPSEEK_V32,
        GLM_MOE_DSA,
    )
}
MOE_FAMILIES = tuple(name for name in FAMILIES if name != "qwen3")


_TEXT_ONLY = (
    "the text part of this release is not read here, as that of Qwen3.5-MoE is; "
    "nearest is a checkpoint of its text alone"
)
_NEAREST = {
    "Qwen3_5MoeForConditionalGeneration": "its config.json has no text_config; nearest is the published one",
    "KimiK25ForConditionalGeneration": "its config.json has no text_config; nearest is the published one",
    "Qwen3VLMoeForConditionalGeneration": "its config.json has no text_config; nearest is the published one",
    "Glm4vMoeForConditionalGeneration": f"{_TEXT_ONLY} (Glm4MoeForCausalLM)",
}
"""Models that are not supported now: the reason, and what is nearest."""


def find_family(hf_config: Mapping[str, Any]) -> Family | None:
    """The family of a config.json, None when it is not supported."""
    by_architecture = {family.architecture: family for family in FAMILIES.values()}
    architectures = hf_config.get("architectures") or []
    return by_architecture.get(architectures[0]) if len(architectures) == 1 else None


def sized_family(hf_config: Mapping[str, Any]) -> Family | None:
    """The family by whose tensors the planner counts: `find_family`'s, or one that learners take by proof."""
    if hf_config.get("architectures") == [NEMOTRON_H.architecture]:
        return NEMOTRON_H
    return find_family(hf_config)


def indexer_layers(hf_config: Mapping[str, Any]) -> tuple[int, ...]:
    """0-based decoder layers whose own indexer chooses tokens; none of a model without sparse attention."""
    family = find_family(hf_config)
    if family is None or family.attention is not sparse_attention:
        return ()
    return tuple(layer for layer, kind in enumerate(indexer_types(hf_config)) if kind == "full")


def keeps_packs_apart(hf_config: Mapping[str, Any]) -> bool:
    """True where every layer keeps the sequences of a pack apart on the DeepSpeed learner.

    Attention over packs does not read the choice of an indexer.
    """
    return find_family(hf_config) is not None and not indexer_layers(hf_config)


def refuse_unsupported(hf_config: Mapping[str, Any], where: str) -> None:
    """Refuse a model that no learner trains rightly now, whatever transformers has for it, with what is nearest.

    Raises:
        CheckpointError: it is one of those in `_NEAREST`, or has its text in a part of config.json.
    """
    architecture = (hf_config.get("architectures") or [""])[0]
    if reason := _NEAREST.get(architecture) or (_TEXT_ONLY if "text_config" in hf_config else ""):
        raise CheckpointError(
            "model architecture is not supported",
            where=where,
            got=f"{architecture}: {reason}",
            expected=f"one of {', '.join(family.architecture for family in FAMILIES.values())}",
            fix="Use a checkpoint of one of these families.",
        )


_NO_CONVERSION = "Use a checkpoint of one of these families, or learner.backend=deepspeed, which needs no conversion."


def family_of(hf_config: Mapping[str, Any], where: str, fix: str = _NO_CONVERSION) -> Family:
    """The family of a config.json.

    Raises `CheckpointError` when it is not supported; `where` is the file, for the message, and `fix` its advice.
    """
    refuse_unsupported(hf_config, where)
    family = find_family(hf_config)
    if family is None:
        raise CheckpointError(
            "model architecture is not supported",
            where=where,
            got=hf_config.get("architectures") or [""],
            expected=f"one of {', '.join(supported.architecture for supported in FAMILIES.values())}",
            fix=fix,
        )
    return family


def sized_family_of(hf_config: Mapping[str, Any], where: str, fix: str = _NO_CONVERSION) -> Family:
    """As `family_of`, and also a family that learners take by proof and whose sizes the planner knows."""
    return sized_family(hf_config) or family_of(hf_config, where, fix)
