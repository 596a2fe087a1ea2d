"""OLMoE: one norm over the queries of all heads and one over all keys; softmax router without normalisation."""

from moe_trm.models.family import GATE, Attention, Family, Required, heads_attention

OLMOE = Family(
    "olmoe",
    "OlmoeForCausalLM",
    lambda _hf, _layer: Attention("full", heads_attention(qk_norm=True)),
    router=lambda _hf: GATE,
    megatron=lambda hf: {"qk_layernorm": True, "moe_router_pre_softmax": not hf.get("norm_topk_prob", False)},
    required={
        "hidden_act": Required("silu", "another activation"),
        "attention_bias": Required(False, "biases in attention"),
        "clip_qkv": Required(None, "clipped queries, keys and values"),
    },
    whole_qk_norms=True,
    # SGLang norms with 1e-5 whatever config.json says.
    tiny={"num_experts": 16, "norm_topk_prob": False, "rms_norm_eps": 1e-5},
)
