"""gpt-oss.

Biases everywhere, a router with a softmax over the chosen experts, attention with a sink per head and windows, a
clamped activation, YaRN. On disk the matrices of all experts of a layer are one tensor, transposed, with alternating
gate and up columns.
"""

from typing import Any

from moe_trm.models.family import Attention, AttentionKind, Family, HfConfig, Link, Required, heads_attention


def _attention(hf: HfConfig, layer: int) -> Attention:
    links = {
        **heads_attention(qk_norm=False, qkv_bias=True),
        "self_attention.linear_proj.bias": Link(("self_attn.o_proj.bias",)),
        "self_attention.core_attention.softmax_offset": Link(("self_attn.sinks",)),
    }
    return Attention(_kind(hf, layer), links)


def _kind(hf: HfConfig, layer: int) -> AttentionKind:
    # Without this list, transformers alternates layers with and without a window, the first with one.
    kinds = hf.get("layer_types")
    is_sliding = kinds[layer] == "sliding_attention" if kinds else layer % 2 == 0
    return "sliding" if is_sliding else "full"


def _expert(number: int) -> dict[str, Link]:
    return {
        "linear_fc1.weight": Link(("mlp.experts.gate_up_proj",), "alternating", number),
        "linear_fc1.bias": Link(("mlp.experts.gate_up_proj_bias",), "alternating", number),
        "linear_fc2.weight": Link(("mlp.experts.down_proj",), "transposed", number),
        "linear_fc2.bias": Link(("mlp.experts.down_proj_bias",), "copy", number),
    }


def _megatron(hf: HfConfig) -> dict[str, Any]:
    alpha, window = float(hf.get("swiglu_alpha", 1.702)), hf.get("sliding_window", 128)
    return {
        "add_bias_linear": True,
        "softmax_type": "learnable",
        # Megatron counts the columns before a token, transformers the token too.
        "window_size": None if window is None else (int(window) - 1, 0),
        "window_attn_skip_freq": [int(_kind(hf, layer) == "sliding") for layer in range(int(hf["num_hidden_layers"]))],
        "activation_func": lambda gate: gate * (alpha * gate).sigmoid(),
        "activation_func_clamp_value": float(hf.get("swiglu_limit", 7.0)),
        "glu_linear_offset": 1.0,
        "moe_router_pre_softmax": False,
    }


def _yarn(hf: HfConfig) -> dict[str, Any]:
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) == "default":
        return {}
    return {
        "rotary_scaling_factor": float(rope["factor"]),
        "original_max_position_embeddings": int(rope["original_max_position_embeddings"]),
        "beta_fast": float(rope.get("beta_fast") or 32),
        "beta_slow": float(rope.get("beta_slow") or 1),
        "mscale": rope.get("mscale"),
        "mscale_all_dim": rope.get("mscale_all_dim"),
        "correction_range_round_to_int": bool(rope.get("truncate", True)),
    }


GPT_OSS = Family(
    "gpt_oss",
    "GptOssForCausalLM",
    _attention,
    router=lambda _hf: {f"mlp.router.{x}": Link((f"mlp.router.{x}",)) for x in ("weight", "bias")},
    expert=_expert,
    megatron=_megatron,
    required={
        "hidden_act": Required("silu", "another activation"),
        "attention_bias": Required(True, "attention without biases"),
    },
    rotations=("default", "yarn"),
    yarn=_yarn,
    expert_biases=True,
    sinks=True,
    tiny={
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_local_experts": 8,
        "sliding_window": 16,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
    },
)
