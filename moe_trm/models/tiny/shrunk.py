"""config.json of a tiny model of the same classes: sizes are divided, kinds of layers stay. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NUM_LAYERS, NUM_EXPERTS, TOP_K, NUM_HEADS, VOCABULARY = 4, 8, 2, 4, 128
_SIZES: Mapping[str, int] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 32,
    "intermediate_size_mlp": 32,
    "ffn_hidden_size": 32,
    "moe_intermediate_size": 16,
    "shared_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    "head_dim": 16,
    "swa_head_dim": 16,
    "global_head_dim": 16,
    "v_head_dim": 16,
    "swa_v_head_dim": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "qk_head_dim": 32,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "max_position_embeddings": 256,
    "sliding_window": 8,
    "sliding_window_size": 8,
    "index_topk": 8,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "mamba_num_heads": 4,
    "mamba_n_heads": 4,
    "mamba_head_dim": 16,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "ssm_state_size": 16,
    "mamba_n_groups": 1,
    "n_groups": 1,
    "chunk_size": 8,
    "mamba_chunk_size": 8,
    "num_nextn_predict_layers": 0,
    "n_group": 1,
    "num_group": 1,
    "topk_group": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Keys of sizes that a config.json has, and what they become. A key that is not there, or not a number, stays so."""
EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts")
"""Keys for the number of experts of a layer."""
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts", "num_selected_experts")
_LAYERS = ("num_hidden_layers", "num_layers", "n_layer")
_BY_LAYER = ("layer_types", "layers_block_type", "mlp_layer_types", "indexer_types")
_HEADS_BY_LAYER = "num_attention_heads_per_layer"


def shrunk(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """A tiny config.json for the classes of `hf_config`.

    Kinds of layers stay in the order of their first appearance; a layer with experts and a dense one are kept where
    `first_k_dense_replace` says which is which.
    """
    small = dict(hf_config)
    for key, size in _SIZES.items():
        if _is_number(small.get(key)):
            small[key] = size
    for key in EXPERT_KEYS:
        if _is_number(small.get(key)):
            small[key] = NUM_EXPERTS
    for key in _TOP_K:
        if _is_number(small.get(key)):
            small[key] = min(TOP_K, int(small[key]))
    depth = next((int(small[key]) for key in _LAYERS if _is_number(small.get(key))), NUM_LAYERS)
    kept = _kept_layers(small, depth)
    for key in _LAYERS:
        if _is_number(small.get(key)):
            small[key] = len(kept)
    for key in _BY_LAYER:
        if isinstance(small.get(key), list):
            small[key] = [small[key][layer] for layer in kept if layer < len(small[key])]
    for key in ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"):
        if _is_number(small.get(key)):
            small[key] = min(1, int(small[key]))
    if isinstance(small.get(_HEADS_BY_LAYER), list):
        small[_HEADS_BY_LAYER] = [NUM_HEADS] * len(kept)
    return small | _heads(small)


def _kept_layers(hf_config: Mapping[str, Any], depth: int) -> list[int]:
    kinds = [tuple(_at(hf_config.get(key), layer) for key in _BY_LAYER) for layer in range(depth)]
    firsts = [layer for layer, kind in enumerate(kinds) if kind not in kinds[:layer]]
    rest = [layer for layer in range(depth) if layer not in firsts]
    return sorted(firsts + rest[: max(0, NUM_LAYERS - len(firsts))])


def _at(kinds: object, layer: int) -> object:
    return kinds[layer] if isinstance(kinds, list) and layer < len(kinds) else None


def _heads(hf_config: Mapping[str, Any]) -> dict[str, int]:
    heads, groups = hf_config.get("num_attention_heads"), hf_config.get("num_key_value_heads")
    if not _is_number(heads):
        return {}
    changed = {"num_attention_heads": NUM_HEADS}
    if _is_number(groups):
        changed["num_key_value_heads"] = NUM_HEADS if groups == heads else NUM_HEADS // 2
    return changed


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
