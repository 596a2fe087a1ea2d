"""Hugging Face Qwen3 / Qwen3-MoE tensors <-> Megatron-Core parameters, bitwise in both directions, one tensor at a time.

A Megatron parameter is one HF tensor or a packing of several. `link` names them; `pack` and `unpack` are exact inverses.
Shape letters: H hidden size, G key/value groups, D head dimension, I expert width.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from moe_trm.errors import CheckpointError


@dataclass(frozen=True)
class Link:
    """The HF tensors of one Megatron parameter, in packing order.

    `copy`: one tensor as it is. `qkv`: query, key and value rows interleaved by group. `gated`: gate rows, then up rows.
    """

    hf_names: tuple[str, ...]
    packing: Literal["copy", "qkv", "gated"] = "copy"


@dataclass(frozen=True)
class Heads:
    """Attention shape that the `qkv` packing needs: `groups` key/value heads of `head_dim`."""

    groups: int
    head_dim: int


_TOP = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
# Transformer Engine fuses a norm into the linear layer behind it and numbers its experts' weights; the tensors are the same.
_IN_LAYER = {
    "input_layernorm.weight": Link(("input_layernorm.weight",)),
    "self_attention.linear_qkv.layer_norm_weight": Link(("input_layernorm.weight",)),
    "pre_mlp_layernorm.weight": Link(("post_attention_layernorm.weight",)),
    "mlp.linear_fc1.layer_norm_weight": Link(("post_attention_layernorm.weight",)),
    "self_attention.linear_qkv.weight": Link(tuple(f"self_attn.{x}_proj.weight" for x in "qkv"), "qkv"),
    "self_attention.linear_proj.weight": Link(("self_attn.o_proj.weight",)),
    "self_attention.q_layernorm.weight": Link(("self_attn.q_norm.weight",)),
    "self_attention.k_layernorm.weight": Link(("self_attn.k_norm.weight",)),
    "mlp.router.weight": Link(("mlp.gate.weight",)),
    "mlp.linear_fc1.weight": Link(("mlp.gate_proj.weight", "mlp.up_proj.weight"), "gated"),
    "mlp.linear_fc2.weight": Link(("mlp.down_proj.weight",)),
}
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.(?:local_experts\.(\d+)\.linear_fc([12])\.weight|linear_fc([12])\.weight(\d+))")


def link(name: str) -> Link:
    """The HF tensors of the Megatron parameter `name`, whose layer and expert numbers are global.

    Raises:
        CheckpointError: a parameter this conversion does not know.
    """
    if name in _TOP:
        return Link((_TOP[name],))
    in_layer = _LAYER.fullmatch(name)
    if in_layer is not None:
        prefix, rest = f"model.layers.{in_layer[1]}.", in_layer[2]
        if rest in _IN_LAYER:
            found = _IN_LAYER[rest]
            return Link(tuple(prefix + hf for hf in found.hf_names), found.packing)
        expert = _EXPERT.fullmatch(rest)
        if expert is not None:
            number, matrix = expert[1] or expert[4], expert[2] or expert[3]
            prefix += f"mlp.experts.{number}."
            if matrix == "1":
                return Link((prefix + "gate_proj.weight", prefix + "up_proj.weight"), "gated")
            return Link((prefix + "down_proj.weight",))
    raise CheckpointError(
        "Megatron parameter has no Hugging Face counterpart",
        where=name,
        got=name,
        expected="a parameter of a Qwen3 or Qwen3-MoE model",
        fix="Report this together with config.json.",
    )


def is_expert(name: str) -> bool:
    """Whether the Megatron parameter `name` belongs to one routed expert (and so to the rank that owns it)."""
    in_layer = _LAYER.fullmatch(name)
    return in_layer is not None and _EXPERT.fullmatch(in_layer[2]) is not None


def with_expert(name: str, expert: int) -> str:
    """`name` of an expert's parameter with its expert number replaced."""
    return re.sub(r"(local_experts\.)\d+|(weight)\d+$", lambda m: f"{m[1] or m[2]}{expert}", name)


def expert_number(name: str) -> int:
    """Expert number in the name of an expert's parameter."""
    in_layer = _LAYER.fullmatch(name)
    expert = _EXPERT.fullmatch(in_layer[2]) if in_layer is not None else None
    assert expert is not None, f"{name} is not an expert's parameter"
    return int(expert[1] or expert[4])


def pack(packing: str, tensors: Sequence[Tensor], heads: Heads) -> Tensor:
    """HF tensors of a `Link` -> the Megatron parameter.

    `qkv`: `[heads*D, H]`, `[G*D, H]`, `[G*D, H]` -> `[G*(heads/G + 2)*D, H]`; `gated`: twice `[I, H]` -> `[2I, H]`.
    """
    if packing == "copy":
        return tensors[0]
    if packing == "gated":
        return torch.cat(list(tensors))
    hidden = tensors[0].shape[1]
    return torch.cat([t.reshape(heads.groups, -1, hidden) for t in tensors], dim=1).reshape(-1, hidden)


def unpack(packing: str, tensor: Tensor, heads: Heads) -> tuple[Tensor, ...]:
    """The Megatron parameter -> HF tensors of its `Link`, contiguous; the exact inverse of `pack`."""
    if packing == "copy":
        return (tensor.contiguous(),)
    if packing == "gated":
        gate, up = tensor.chunk(2)
        return gate.contiguous(), up.contiguous()
    hidden = tensor.shape[1]
    grouped = tensor.reshape(heads.groups, -1, hidden)
    query_rows = grouped.shape[1] - 2 * heads.head_dim
    parts = torch.split(grouped, [query_rows, heads.head_dim, heads.head_dim], dim=1)
    return tuple(part.reshape(-1, hidden).contiguous() for part in parts)
