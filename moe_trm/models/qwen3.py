"""Qwen3 and Qwen3-MoE: norms of queries and keys by head; softmax router."""

from moe_trm.models.family import GATE, Attention, Family, HfConfig, Link, Required, heads_attention

REQUIRED = {
    "hidden_act": Required("silu", "another activation"),
    "attention_bias": Required(False, "biases in attention"),
    "use_sliding_window": Required(False, "attention over a window"),
}


def _attention(hf: HfConfig, _layer: int) -> Attention:
    if not hf.get("attention_bias", False):
        return Attention("full", heads_attention(qk_norm=True))
    # Only DeepSpeed trains these (`REQUIRED` is for Megatron).
    out = {"self_attention.linear_proj.bias": Link(("self_attn.o_proj.bias",))}
    return Attention("full", heads_attention(qk_norm=True, qkv_bias=True) | out)


def _megatron(hf: HfConfig) -> dict[str, object]:
    return {"qk_layernorm": True, "moe_router_pre_softmax": not hf.get("norm_topk_prob", False)}


QWEN3 = Family("qwen3", "Qwen3ForCausalLM", _attention, megatron=lambda _hf: {"qk_layernorm": True}, required=REQUIRED)
QWEN3_MOE = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    _attention,
    router=lambda _hf: GATE,
    megatron=_megatron,
    required=REQUIRED,
    exact=True,
    tiny={
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 16,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
)
