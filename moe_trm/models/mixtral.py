"""Mixtral: no query and key norms, gate weights are always normalised, and tensors have other names."""

from moe_trm.models.family import Attention, Family, Link, Required, expert_matrices, heads_attention

MIXTRAL = Family(
    "mixtral",
    "MixtralForCausalLM",
    lambda _hf, _layer: Attention("full", heads_attention(qk_norm=False)),
    router=lambda _hf: {"mlp.router.weight": Link(("block_sparse_moe.gate.weight",))},
    expert=expert_matrices(
        "block_sparse_moe.experts.{}.w1.weight",
        "block_sparse_moe.experts.{}.w3.weight",
        "block_sparse_moe.experts.{}.w2.weight",
    ),
    megatron=lambda _hf: {"qk_layernorm": False, "moe_router_pre_softmax": False},
    required={
        "hidden_act": Required("silu", "another activation"),
        "sliding_window": Required(None, "attention over a window"),
        "router_jitter_noise": Required(0.0, "input noise that makes replay differ from the rollout"),
    },
    tiny={"num_local_experts": 8, "num_key_value_heads": 2},
)
