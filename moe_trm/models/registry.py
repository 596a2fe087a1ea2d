"""Every family by name, and the one that a config.json belongs to. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_trm.errors import CheckpointError
from moe_trm.models.deepseek_v3 import DEEPSEEK_V3
from moe_trm.models.family import Family
from moe_trm.models.glm4_moe import GLM4_MOE
from moe_trm.models.gpt_oss import GPT_OSS
from moe_trm.models.mixtral import MIXTRAL
from moe_trm.models.olmoe import OLMOE
from moe_trm.models.qwen3 import QWEN3, QWEN3_MOE

FAMILIES: Mapping[str, Family] = {
    family.name: family for family in (QWEN3, QWEN3_MOE, OLMOE, MIXTRAL, GLM4_MOE, DEEPSEEK_V3, GPT_OSS)
}
MOE_FAMILIES = tuple(name for name in FAMILIES if name != "qwen3")


def family_of(hf_config: Mapping[str, Any], where: str) -> Family:
    """The family of a config.json. Raises `CheckpointError` when it is none of ours; `where` is the file, for the message."""
    architectures = hf_config.get("architectures") or []
    known = {family.architecture: family for family in FAMILIES.values()}
    if len(architectures) != 1 or architectures[0] not in known:
        raise CheckpointError(
            "model architecture is not supported",
            where=where,
            got=architectures,
            expected=f"one of {', '.join(known)}",
            fix="Use a checkpoint of one of these families, or learner.backend=deepspeed, which needs no conversion.",
        )
    return known[architectures[0]]
