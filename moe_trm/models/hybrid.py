"""Parts of models that have layers with the gated delta rule among layers with full attention.

A layer of the first kind has a state of fixed size in place of keys and values: a convolution over the last tokens,
and a matrix that decays and is corrected by each token. A layer of the second kind has a gate on its output.
"""

from __future__ import annotations

from collections.abc import Iterable

from moe_trm.models.family import GATE, NORMS, Attention, HfConfig, Link, Required, heads_attention

ONLY_TRANSFORMERS = "the gated delta rule, which only transformers computes here"
HYBRID_REQUIRED = {
    "hidden_act": Required("silu", "another activation"),
    "attention_bias": Required(False, "biases in attention"),
}


def is_delta(hf: HfConfig, layer: int) -> bool:
    """True for a layer with the gated delta rule. Without `layer_types`, every fourth one has full attention."""
    if kinds := hf.get("layer_types"):
        return bool(kinds[layer] == "linear_attention")
    return (layer + 1) % int(hf.get("full_attention_interval") or 4) != 0


def hybrid_attention(hf: HfConfig, layer: int, projections: Iterable[str]) -> Attention:
    """Attention of a layer; `projections` into the delta rule are what differs between families."""
    if not is_delta(hf, layer):
        return Attention("full", heads_attention(qk_norm=True))
    names = [*(f"{name}.weight" for name in (*projections, "conv1d", "norm", "out_proj")), "A_log", "dt_bias"]
    return Attention(
        "gated delta", NORMS | {f"self_attention.{name}": Link((f"linear_attn.{name}",)) for name in names}
    )


def gated_shared_expert(_hf: HfConfig) -> dict[str, Link]:
    """The router, and one expert that sees every token behind a gate of its own."""
    stem = "mlp.shared_expert"
    return {
        **GATE,
        "mlp.shared_experts.linear_fc1.weight": Link((f"{stem}.gate_proj.weight", f"{stem}.up_proj.weight"), "gated"),
        "mlp.shared_experts.linear_fc2.weight": Link((f"{stem}.down_proj.weight",)),
        "mlp.shared_experts.gate_weight": Link((f"{stem}_gate.weight",)),
    }


TINY = {
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 16,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "partial_rotary_factor": 0.25,
    # At 0.2 the gated norm blows up rounding: float32 is 4e-4 from float64 in a log-prob of transformers.
    "initializer_range": 0.05,
}
