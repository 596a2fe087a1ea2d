"""Differences between model families, as plain data. Imports no torch.

Weights: a Megatron parameter is one Hugging Face tensor or a packing of several; `Link` names them. Names are those
inside one decoder layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from moe_trm.models.hf_config import moe_layers

Packing = Literal["copy", "qkv", "gated", "transposed", "alternating"]
HfConfig = Mapping[str, Any]
AttentionKind = Literal["full", "sliding", "latent", "sparse", "gated delta", "mamba", "none"]
FeedForwardKind = Literal["dense", "experts", "none"]


@dataclass(frozen=True)
class Link:
    """The HF tensors of one Megatron parameter, in packing order.

    `copy`: one tensor as it is. `qkv`: query, key and value rows interleaved by group. `gated`: gate rows, then up
    rows. `transposed`: one transposed tensor. `alternating`: gate rows, then up rows, from columns that take turns.

    `row`: the parameter is this row of the one HF tensor, which holds every expert of its layer.
    """

    hf_names: tuple[str, ...]
    packing: Packing = "copy"
    row: int | None = None


@dataclass(frozen=True)
class Required:
    """A value of config.json that the Megatron model needs; an absent key has it.

    `why`: what the model would otherwise be.
    """

    value: Any
    why: str


def expert_matrices(gate: str, up: str, down: str) -> Callable[[int], Mapping[str, Link]]:
    """Experts with separate tensors; in their names `{}` stands for the expert's number."""
    return lambda number: {
        "linear_fc1.weight": Link((gate.format(number), up.format(number)), "gated"),
        "linear_fc2.weight": Link((down.format(number),)),
    }


PROJECTIONS = expert_matrices(*(f"mlp.experts.{{}}.{x}_proj.weight" for x in ("gate", "up", "down")))


@dataclass(frozen=True)
class Attention:
    """One layer's attention: its kind, and its tensors with the two norms of the layer."""

    kind: AttentionKind
    tensors: Mapping[str, Link]


@dataclass(frozen=True)
class Layer:
    """One decoder layer.

    Attributes:
        attention: its kind.
        feed_forward: its kind.
        tensors: all but the routed experts'.
        expert: tensors of one routed expert from its number, by Megatron's names inside the expert; none of a dense
            layer.
    """

    attention: AttentionKind
    feed_forward: FeedForwardKind
    tensors: Mapping[str, Link]
    expert: Callable[[int], Mapping[str, Link]]


@dataclass(frozen=True)
class Family:
    """One architecture of transformers.

    Attributes:
        name: as people write it in a file name.
        architecture: in config.json.
        attention: of a layer, from config.json and its 0-based number.
        router: `mlp.router.*` of Megatron and shared experts, from config.json; empty for dense families.
        expert: tensors of one routed expert from its number, by Megatron's names inside the expert.
        megatron: keywords for Megatron's configuration that other families have not, from config.json.
        required: by key of config.json.
        rotations: kinds of rotary position embedding that are converted.
        yarn: what Megatron's YaRN rotation is made of, from config.json; empty where rotation is not scaled, or is
            latent attention's own.
        whole_qk_norms: queries and keys are normed over all heads together.
        expert_biases: experts have biases.
        sinks: attention has a logit more than keys.
        exact: runs with `exact: true` have been measured.
        not_in_megatron: what Megatron-Core's learner lacks for it; empty where it has everything.
        tiny: config.json values of a tiny checkpoint, over `tiny.COMMON`.
    """

    name: str
    architecture: str
    attention: Callable[[HfConfig, int], Attention]
    router: Callable[[HfConfig], Mapping[str, Link]] = lambda _hf: {}
    expert: Callable[[int], Mapping[str, Link]] = PROJECTIONS
    megatron: Callable[[HfConfig], dict[str, Any]] = lambda _hf: {}
    required: Mapping[str, Required] = field(default_factory=dict)
    rotations: tuple[str, ...] = ("default",)
    yarn: Callable[[HfConfig], Mapping[str, Any]] = lambda _hf: {}
    whole_qk_norms: bool = False
    expert_biases: bool = False
    sinks: bool = False
    exact: bool = False
    not_in_megatron: str = ""
    tiny: Mapping[str, Any] = field(default_factory=dict)

    def layer(self, hf: HfConfig, index: int) -> Layer:
        """Decoder layer `index`, counted from 0, of the model that config.json describes."""
        attention = self.attention(hf, index)
        if index in moe_layers(hf):
            return Layer(attention.kind, "experts", {**attention.tensors, **self.router(hf)}, self.expert)
        return Layer(attention.kind, "dense", {**attention.tensors, **DENSE}, lambda _number: {})

    def num_cached(self, hf: HfConfig) -> int:
        """Number of layers that keep keys and values, or latents, of every token."""
        kinds = (self.attention(hf, index).kind for index in range(int(hf["num_hidden_layers"])))
        return sum(kind not in ("gated delta", "mamba", "none") for kind in kinds)

    def attention_kinds(self, hf: HfConfig) -> frozenset[AttentionKind]:
        """The kinds of attention that the layers of this model have."""
        return frozenset(self.attention(hf, index).kind for index in range(int(hf["num_hidden_layers"])))


NORMS = {
    "input_layernorm.weight": Link(("input_layernorm.weight",)),
    "pre_mlp_layernorm.weight": Link(("post_attention_layernorm.weight",)),
}
DENSE = {
    "mlp.linear_fc1.weight": Link(("mlp.gate_proj.weight", "mlp.up_proj.weight"), "gated"),
    "mlp.linear_fc2.weight": Link(("mlp.down_proj.weight",)),
}
SHARED = {
    "mlp.shared_experts.linear_fc1.weight": Link(
        ("mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"), "gated"
    ),
    "mlp.shared_experts.linear_fc2.weight": Link(("mlp.shared_experts.down_proj.weight",)),
}
GATE = {"mlp.router.weight": Link(("mlp.gate.weight",))}
GATE_BIAS = {"mlp.router.expert_bias": Link(("mlp.gate.e_score_correction_bias",))}


def heads_attention(*, qk_norm: bool, qkv_bias: bool = False) -> dict[str, Link]:
    """Attention with query, key and value projections, and the two norms of a layer."""
    links = {
        **NORMS,
        "self_attention.linear_qkv.weight": Link(tuple(f"self_attn.{x}_proj.weight" for x in "qkv"), "qkv"),
        "self_attention.linear_proj.weight": Link(("self_attn.o_proj.weight",)),
    }
    if qkv_bias:
        links["self_attention.linear_qkv.bias"] = Link(tuple(f"self_attn.{x}_proj.bias" for x in "qkv"), "qkv")
    if qk_norm:
        links |= {f"self_attention.{x}_layernorm.weight": Link((f"self_attn.{x}_norm.weight",)) for x in "qk"}
    return links


def sigmoid_router(hf: HfConfig) -> dict[str, Any]:
    """Megatron's keywords for sigmoid routers with selection bias and groups, scaled weights and shared experts.

    The weights are normalised first.

    The bias stays as the checkpoint has it: its update rate is 0.
    """
    groups = int(hf.get("n_group") or 1)
    shared = int(hf.get("n_shared_experts") or 0)
    keywords: dict[str, Any] = {
        "moe_router_score_function": "sigmoid",
        "moe_router_pre_softmax": False,
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_topk_scaling_factor": float(hf.get("routed_scaling_factor", 1.0)),
    }
    if groups > 1:
        keywords |= {"moe_router_num_groups": groups, "moe_router_group_topk": int(hf["topk_group"])}
    if shared:
        keywords["moe_shared_expert_intermediate_size"] = shared * int(hf["moe_intermediate_size"])
    return keywords


def sigmoid_tensors(hf: HfConfig) -> dict[str, Link]:
    """Router, its bias, and shared experts where there are any."""
    return {**GATE, **GATE_BIAS, **(SHARED if hf.get("n_shared_experts") else {})}


SIGMOID_REQUIRED = {
    "norm_topk_prob": Required(True, "gate weights that are not normalised"),
    "hidden_act": Required("silu", "another activation"),
}
