"""DeepSeek-V3 (also Kimi-K2).

Latent attention, a sigmoid router with a selection bias and expert groups, shared experts, dense first layers.
"""

from moe_trm.models.family import (
    NORMS,
    SIGMOID_REQUIRED,
    Attention,
    Family,
    HfConfig,
    Link,
    Required,
    sigmoid_router,
    sigmoid_tensors,
)

LATENT_EPSILON = 1e-6
"""Of the norms of latents in transformers, whatever `rms_norm_eps` is."""


def latent_attention(hf: HfConfig, _layer: int) -> Attention:
    """Projections into latents and out of them, and the norms of latents."""
    names = {"linear_kv_down_proj": "kv_a_proj_with_mqa", "linear_kv_up_proj": "kv_b_proj", "linear_proj": "o_proj"}
    names |= {"kv_layernorm": "kv_a_layernorm"}
    if hf.get("q_lora_rank"):
        names |= {"linear_q_down_proj": "q_a_proj", "linear_q_up_proj": "q_b_proj", "q_layernorm": "q_a_layernorm"}
    else:
        names |= {"linear_q_proj": "q_proj"}
    links = {f"self_attention.{ours}.weight": Link((f"self_attn.{hf}.weight",)) for ours, hf in names.items()}
    return Attention("latent", NORMS | links)


def _megatron(hf: HfConfig) -> dict[str, object]:
    return {
        "multi_latent_attention": True,
        # Megatron-Core 0.19 would norm queries that have no latent, too.
        "qk_layernorm": bool(hf.get("q_lora_rank")),
        "q_lora_rank": hf.get("q_lora_rank"),
        "kv_lora_rank": int(hf["kv_lora_rank"]),
        "qk_head_dim": int(hf["qk_nope_head_dim"]),
        "qk_pos_emb_head_dim": int(hf["qk_rope_head_dim"]),
        "v_head_dim": int(hf["v_head_dim"]),
        **_rotation(hf),
        **sigmoid_router(hf),
    }


def _rotation(hf: HfConfig) -> dict[str, object]:
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    rotation: dict[str, object] = {"rotary_base": float(rope.get("rope_theta") or hf.get("rope_theta", 10000.0))}
    if rope.get("rope_type", rope.get("type", "default")) == "default":
        return {**rotation, "rope_type": "rope", "rotary_scaling_factor": 1.0}
    return {
        **rotation,
        "rope_type": "yarn",
        "rotary_scaling_factor": float(rope["factor"]),
        "original_max_position_embeddings": int(rope["original_max_position_embeddings"]),
        "beta_fast": float(rope.get("beta_fast") or 32),
        "beta_slow": float(rope.get("beta_slow") or 1),
        "mscale": float(rope.get("mscale") or 1.0),
        "mscale_all_dim": float(rope.get("mscale_all_dim") or 0.0),
    }


DEEPSEEK_V3 = Family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    latent_attention,
    router=sigmoid_tensors,
    megatron=_megatron,
    required={
        **SIGMOID_REQUIRED,
        "attention_bias": Required(False, "biases in attention"),
        "rope_interleave": Required(True, "another order of rotated columns"),
    },
    rotations=("default", "yarn"),
    tiny={
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "q_lora_rank": 32,
        # Not `v_head_dim`: an engine that took latents for values would compute with them.
        "kv_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "n_routed_experts": 16,
        "n_shared_experts": 1,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        # Megatron adds up the topk / topk_group best scores of a group, transformers always the best two.
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    },
)
