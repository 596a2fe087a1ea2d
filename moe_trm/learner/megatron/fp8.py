"""Matrix products in 8 bits: Megatron's options for them, and the shapes they take. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_trm.config.schema import LearnerConfig
from moe_trm.errors import ConfigError
from moe_trm.models.hf_config import expert_width, moe_layers

FORMATS = {"delayed": "hybrid", "tensorwise": "hybrid", "blockwise": "e4m3", "mxfp8": "e4m3"}
"""FP8 format by recipe.

`hybrid` uses e5m2 (more range, less precision) for gradients. `e4m3` is one format for everything, which block-wise
scales allow.
"""


def alignment(learner: LearnerConfig) -> int:
    """Divisor that FP8 requires of every dimension of a matrix product; 1 without FP8.

    It is Megatron-Core's `fp8_utils.get_fp8_align_size`.
    """
    return {"none": 1, "mxfp8": 32}.get(learner.fp8, 16)


def options(learner: LearnerConfig) -> dict[str, Any]:
    """Fields of Megatron's `TransformerConfig`."""
    if learner.fp8 == "none":
        return {}
    ends = learner.fp8_bfloat16_layers
    return {
        "fp8": FORMATS[learner.fp8],
        "fp8_recipe": learner.fp8,
        "first_last_layers_bf16": learner.fp8 != "delayed" and ends > 0,
        "num_layers_at_start_in_bf16": ends,
        "num_layers_at_end_in_bf16": ends,
    }


def check_shapes(learner: LearnerConfig, hf: Mapping[str, Any]) -> None:
    """Refuse a model whose matrices have no 8-bit product under these settings.

    Raises:
        ConfigError: a width, as one rank holds it, that is no multiple of `alignment`, or more bfloat16 layers than
            there are.
    """
    multiple, parallel = alignment(learner), learner.parallel
    if learner.fp8 == "none":
        return
    heads, groups = int(hf["num_attention_heads"]), int(hf["num_key_value_heads"])
    head_dim = int(hf.get("head_dim") or hf["hidden_size"] // heads)
    widths = {
        "hidden_size": int(hf["hidden_size"]),
        "columns of queries": heads * head_dim // parallel.tensor,
        "columns of keys and values": groups * head_dim // parallel.tensor,
    }
    moe, num_layers = moe_layers(hf), int(hf["num_hidden_layers"])
    if len(moe) < num_layers:
        widths["columns of the dense layers"] = int(hf["intermediate_size"]) // parallel.tensor
    if moe:
        widths["columns of an expert"] = expert_width(hf) // parallel.expert_tensor
    for what, width in widths.items():
        if width % multiple:
            raise ConfigError(
                "a matrix of this model has no 8-bit product",
                where="learner.fp8",
                got=f"{width} {what} on each rank, learner.fp8={learner.fp8}",
                expected=f"a multiple of {multiple}",
                fix=(
                    "Share matrices between fewer ranks (learner.parallel.tensor, expert_tensor), or set "
                    "learner.fp8=none."
                ),
            )
    at_most = num_layers // parallel.pipeline
    if learner.fp8 != "delayed" and learner.fp8_bfloat16_layers > at_most:
        raise ConfigError(
            "more layers are to stay in bfloat16 than a pipeline stage has",
            where="learner.fp8_bfloat16_layers",
            got=learner.fp8_bfloat16_layers,
            expected=f"at most {at_most}",
        )
