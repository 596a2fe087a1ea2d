"""Tiny random checkpoints of the families of transformers that the learners train, with the sizes of `tiny.py`."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from tests.integration.learner_support.tiny import EXPERTS, INDEX_TOP_K, SHAPE, TOP_K, save_model

SIGMOID = {
    "n_routed_experts": EXPERTS, "n_shared_experts": 1, "moe_intermediate_size": 32, "n_group": 2, "topk_group": 1,
    "norm_topk_prob": True, "routed_scaling_factor": 2.5, "first_k_dense_replace": 1,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "olmoe": ("Olmoe", {"num_experts": EXPERTS, "norm_topk_prob": False}),
    "mixtral": ("Mixtral", {"num_local_experts": EXPERTS}),
    "deepseek_v3": ("DeepseekV3", {**SIGMOID, "num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 16,
                                   "qk_rope_head_dim": 8, "head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
                                   "rms_norm_eps": 1e-3}),
    "glm4_moe": ("Glm4Moe", SIGMOID),
    "gpt_oss": ("GptOss", {"num_local_experts": EXPERTS, "sliding_window": 4,
                           "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
                                               "truncate": False,
                                               "original_max_position_embeddings": 64, "beta_fast": 8.0}}),
    "minimax_m2": ("MiniMaxM2", {"num_local_experts": EXPERTS, "rotary_dim": 8, "intermediate_size": 32}),
    "glm4_moe_lite": ("Glm4MoeLite", {**SIGMOID, "n_group": 1, "num_key_value_heads": 4, "q_lora_rank": 16,
                                      "kv_lora_rank": 16, "qk_rope_head_dim": 8, "head_dim": 8, "qk_nope_head_dim": 8,
                                      "v_head_dim": 16}),
}  # fmt: skip
"""Name in transformers -> prefix of its classes, and what its configuration says beside `SHAPE`."""
DELTA = {
    "num_experts": EXPERTS, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
HYBRIDS = {"qwen3_next": ("Qwen3Next", DELTA), "qwen3_5_moe": ("Qwen3_5MoeText", DELTA)}
"""The same for families that only DeepSpeed trains."""
INDEXER = {**SIGMOID, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
           "head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "index_topk": INDEX_TOP_K, "index_n_heads": 2,
           "index_head_dim": 16}  # fmt: skip
SPARSE: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v32": ("DeepseekV32", INDEXER),
    "glm_moe_dsa": ("GlmMoeDsa", {**INDEXER, "n_group": 1, "indexer_types": ["full", "shared", "full"]}),
}
"""The same for families that only DeepSpeed trains, on padded rows."""


def make_family(name: str, folder: Path, **overrides: object) -> Path:
    """Random weights; a selection bias, where there is one, that changes the choice of experts."""
    prefix, options = (FAMILIES | HYBRIDS | SPARSE)[name]
    module = importlib.import_module(f"transformers.models.{name}")
    config = getattr(module, f"{prefix}Config")(**{**SHAPE, "num_experts_per_tok": TOP_K, **options, **overrides})
    return save_model(getattr(module, f"{prefix.removesuffix('Text')}ForCausalLM"), config, folder)
