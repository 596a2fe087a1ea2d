"""GLM-4-MoE (GLM-4.5).

A sigmoid router with a selection bias, shared experts, dense first layers, rotation of half of each head.
"""

from moe_trm.models.family import (
    SIGMOID_REQUIRED,
    Attention,
    Family,
    HfConfig,
    heads_attention,
    sigmoid_router,
    sigmoid_tensors,
)


def _attention(hf: HfConfig, _layer: int) -> Attention:
    norm, bias = bool(hf.get("use_qk_norm", False)), bool(hf.get("attention_bias", False))
    return Attention("full", heads_attention(qk_norm=norm, qkv_bias=bias))


def _megatron(hf: HfConfig) -> dict[str, object]:
    return {
        "qk_layernorm": bool(hf.get("use_qk_norm", False)),
        "add_qkv_bias": bool(hf.get("attention_bias", False)),
        **sigmoid_router(hf),
    }


GLM4_MOE = Family(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    _attention,
    router=sigmoid_tensors,
    megatron=_megatron,
    required=SIGMOID_REQUIRED,
    exact=True,
    tiny={
        "num_key_value_heads": 2,
        "head_dim": 32,
        "n_routed_experts": 16,
        "n_shared_experts": 1,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
        "use_qk_norm": True,
    },
)
