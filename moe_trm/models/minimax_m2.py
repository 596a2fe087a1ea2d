"""MiniMax-M2 (also M2.1, M2.5).

A sigmoid router with a selection bias, one norm over the queries of all heads and one over all keys, rotation of a
part of each head. Tensors of experts have Mixtral's names.
"""

from moe_trm.models.family import Attention, Family, HfConfig, Link, Required, heads_attention, sigmoid_router
from moe_trm.models.mixtral import MIXTRAL


def _router(_hf: HfConfig) -> dict[str, Link]:
    return {
        "mlp.router.weight": Link(("block_sparse_moe.gate.weight",)),
        "mlp.router.expert_bias": Link(("block_sparse_moe.e_score_correction_bias",)),
    }


MINIMAX_M2 = Family(
    "minimax_m2",
    "MiniMaxM2ForCausalLM",
    lambda _hf, _layer: Attention("full", heads_attention(qk_norm=True)),
    router=_router,
    expert=MIXTRAL.expert,
    megatron=lambda hf: {"qk_layernorm": True, **sigmoid_router(hf)},
    required={
        **{key: MIXTRAL.required[key] for key in ("hidden_act", "sliding_window", "router_jitter_noise")},
        "scoring_func": Required("sigmoid", "another router"),
        "use_qk_norm": Required(True, "attention without norms"),
        "qk_norm_type": Required("per_layer", "norms head by head"),
        "use_routing_bias": Required(True, "a router without a selection bias"),
        "shared_intermediate_size": Required(0, "shared experts"),
    },
    whole_qk_norms=True,
    tiny={
        "num_local_experts": 16,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rotary_dim": 16,
        "intermediate_size": 32,
        # transformers has these always; SGLang has them where they are said.
        "scoring_func": "sigmoid",
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "use_routing_bias": True,
    },
)
