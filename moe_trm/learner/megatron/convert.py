"""Hugging Face Qwen3 / Qwen3-MoE tensors <-> Megatron-Core parameters, bitwise in both directions, one tensor at a time.

A Megatron parameter is one HF tensor or a packing of several. `link` names them; `pack` and `unpack` are exact inverses.
Shape letters: H hidden size, G key/value groups, D head dimension, I expert width.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
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
_ATTENTION = (
    "input_layernorm.weight",
    "pre_mlp_layernorm.weight",
    *(f"self_attention.{name}.weight" for name in ("linear_qkv", "linear_proj", "q_layernorm", "k_layernorm")),
)
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_CUT_ROWS = re.compile(r"(word_embeddings|output_layer|linear_qkv|linear_fc1)\.weight\d*$")
_CUT_COLUMNS = re.compile(r"(linear_proj|linear_fc2)\.weight\d*$")
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


def parameter_names(num_layers: int, moe_layers: Sequence[int], num_experts: int, *, tied: bool) -> Iterator[str]:
    """Names of all parameters of the whole model, one per place in the checkpoint."""
    yield from (name for name in _TOP if not (tied and name == "output_layer.weight"))
    for layer in range(num_layers):
        prefix = f"decoder.layers.{layer}."
        yield from (prefix + name for name in _ATTENTION)
        if layer not in moe_layers:
            yield from (f"{prefix}mlp.linear_fc{matrix}.weight" for matrix in (1, 2))
            continue
        yield f"{prefix}mlp.router.weight"
        for expert in range(num_experts):
            yield from (f"{prefix}mlp.experts.local_experts.{expert}.linear_fc{matrix}.weight" for matrix in (1, 2))


def is_expert(name: str) -> bool:
    """Whether the Megatron parameter `name` belongs to one routed expert (and so to the rank that owns it)."""
    in_layer = _LAYER.fullmatch(name)
    return in_layer is not None and _EXPERT.fullmatch(in_layer[2]) is not None


def with_layer(name: str, first: int) -> str:
    """`name` with its layer number, if it has one, counted from layer `first` of the model."""
    return _LAYER.sub(lambda m: f"decoder.layers.{first + int(m[1])}.{m[2]}", name)


def with_expert(name: str, expert: int) -> str:
    """`name` of an expert's parameter with its expert number replaced."""
    return re.sub(r"(local_experts\.)\d+|(weight)\d+$", lambda m: f"{m[1] or m[2]}{expert}", name)


def expert_number(name: str) -> int:
    """Expert number in the name of an expert's parameter."""
    in_layer = _LAYER.fullmatch(name)
    expert = _EXPERT.fullmatch(in_layer[2]) if in_layer is not None else None
    assert expert is not None, f"{name} is not an expert's parameter"
    return int(expert[1] or expert[4])


def split_dim(name: str) -> int | None:
    """Dimension in which tensor parallelism cuts the parameter `name`; None: every rank holds all of it."""
    if _CUT_ROWS.search(name):
        return 0
    return 1 if _CUT_COLUMNS.search(name) else None


def part(packing: str, tensor: Tensor, dim: int, size: int, rank: int) -> Tensor:
    """The part of a whole Megatron parameter that rank `rank` of `size` holds. Gate and up rows are cut one by one."""
    if packing == "gated" and dim == 0:
        return torch.cat([half.chunk(size)[rank] for half in tensor.chunk(2)])
    return tensor.chunk(size, dim)[rank]


def join(packing: str, parts: Sequence[Tensor], dim: int) -> Tensor:
    """The whole Megatron parameter from the parts of all ranks; the exact inverse of `part`."""
    if packing == "gated" and dim == 0:
        gates, ups = zip(*(one.chunk(2) for one in parts), strict=True)
        return torch.cat([*gates, *ups])
    return torch.cat(list(parts), dim)


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
