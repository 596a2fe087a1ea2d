"""Hugging Face tensors <-> Megatron-Core parameters, bitwise in both directions, one tensor at a time.

A Megatron parameter is one HF tensor or a packing of several. `Names` names them for each family of `moe_trm.models`;
`pack` and `unpack` are exact inverses. Shape letters: H hidden size, G key/value groups, D head dimension, I expert
width.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moe_trm.errors import CheckpointError
from moe_trm.models.family import Layer, Link, Packing
from moe_trm.models.hf_config import head_dim
from moe_trm.models.registry import family_of
from moe_trm.models.tensors import TOP


@dataclass(frozen=True)
class Heads:
    """Attention shape that the `qkv` packing needs: `groups` key/value heads of `head_dim`."""

    groups: int
    head_dim: int


def heads(hf: Mapping[str, Any]) -> Heads:
    """Attention shape of the model that config.json describes."""
    return Heads(groups=int(hf["num_key_value_heads"]), head_dim=head_dim(hf))


_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.linear_q_up_proj.layer_norm_weight": "self_attention.q_layernorm.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight": "self_attention.kv_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_CUT_ROWS = re.compile(
    r"((word_embeddings|output_layer|linear_(q|q_up|kv_up)_proj)\.weight|"
    r"(linear_qkv|linear_fc1)\.(weight|bias)|core_attention\.softmax_offset)$"
)
_CUT_COLUMNS = re.compile(r"(linear_proj|linear_fc2)\.weight$")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12]\.(?:weight|bias))")
_GROUPED = re.compile(r"mlp\.experts\.(linear_fc[12]\.(?:weight|bias))(\d+)")


def plain(name: str) -> str:
    """The parameter `name` as Megatron's plain layers call it.

    Transformer Engine fuses a norm into the linear layer behind it, and its grouped layers number the weights of their
    experts. The tensors are the same; everything here but this function knows the plain names only, so that checkpoints
    fit layers of either kind.

    >>> plain("decoder.layers.3.mlp.experts.linear_fc1.weight7")
    'decoder.layers.3.mlp.experts.local_experts.7.linear_fc1.weight'
    """
    if in_layer := _LAYER.fullmatch(name):
        rest = _FUSED_NORMS.get(in_layer[2], in_layer[2])
        return f"decoder.layers.{in_layer[1]}." + _GROUPED.sub(r"mlp.experts.local_experts.\2.\1", rest)
    return name


class Names:
    """Hugging Face names of one model's Megatron parameters. Raises `CheckpointError`, naming `where`, for other
    families.
    """

    def __init__(self, hf: Mapping[str, Any], where: str = "config.json") -> None:
        self._family = family_of(hf, where)
        self._hf = hf
        self._layers: dict[int, Layer] = {}

    def link(self, name: str) -> Link:
        """The HF tensors of the Megatron parameter `name`, whose layer and expert numbers are global.

        Raises:
            CheckpointError: a parameter this family does not have.
        """
        if name in TOP:
            return Link((TOP[name],))
        if in_layer := _LAYER.fullmatch(name):
            prefix, layer, rest = f"model.layers.{in_layer[1]}.", self._layer(int(in_layer[1])), in_layer[2]
            expert = _EXPERT.fullmatch(rest)
            layer_link = layer.tensors.get(rest) if expert is None else layer.expert(int(expert[1])).get(expert[2])
            if layer_link is not None:
                return replace(layer_link, hf_names=tuple(prefix + hf_name for hf_name in layer_link.hf_names))
        raise CheckpointError(
            "Megatron parameter has no Hugging Face counterpart",
            where=name,
            got=name,
            expected=f"a parameter of a {self._family.name} model",
            fix="Report this together with config.json.",
        )

    def _layer(self, number: int) -> Layer:
        if number not in self._layers:
            self._layers[number] = self._family.layer(self._hf, number)
        return self._layers[number]


def is_gated(name: str) -> bool:
    """True when the Megatron parameter `name` has gate rows, then up rows, which tensor parallelism cuts separately."""
    return re.search(r"\.linear_fc1\.(weight|bias)$", name) is not None


def is_expert(name: str) -> bool:
    """True when the Megatron parameter `name` belongs to one routed expert (and so to the rank that owns it)."""
    in_layer = _LAYER.fullmatch(name)
    return in_layer is not None and _EXPERT.fullmatch(in_layer[2]) is not None


def with_layer(name: str, first: int) -> str:
    """`name` with its layer number, if it has one, counted from layer `first` of the model."""
    return _LAYER.sub(lambda m: f"decoder.layers.{first + int(m[1])}.{m[2]}", name)


def with_expert(name: str, expert: int) -> str:
    """`name` of an expert's parameter with its expert number replaced."""
    return re.sub(r"(local_experts\.)\d+", lambda m: f"{m[1]}{expert}", name)


def expert_number(name: str) -> int:
    """Expert number in the name of an expert's parameter."""
    in_layer = _LAYER.fullmatch(name)
    expert = _EXPERT.fullmatch(in_layer[2]) if in_layer is not None else None
    assert expert is not None, f"{name} is not an expert's parameter"
    return int(expert[1])


def split_dim(name: str) -> int | None:
    """Dimension in which tensor parallelism cuts the parameter `name`; None: every rank holds all of it."""
    if _CUT_ROWS.search(name):
        return 0
    return 1 if _CUT_COLUMNS.search(name) else None


def part(name: str, tensor: Tensor, dim: int, size: int, rank: int) -> Tensor:
    """The part of the whole Megatron parameter `name` that rank `rank` of `size` holds.

    Gate and up rows are cut one by one.
    """
    if is_gated(name):
        return torch.cat([half.chunk(size)[rank] for half in tensor.chunk(2)])
    return tensor.chunk(size, dim)[rank]


def join(name: str, parts: Sequence[Tensor], dim: int) -> Tensor:
    """The whole Megatron parameter `name` from the parts of all ranks; the exact inverse of `part`."""
    if is_gated(name):
        gates, ups = zip(*(part.chunk(2) for part in parts), strict=True)
        return torch.cat([*gates, *ups])
    return torch.cat(list(parts), dim)


def pack(packing: Packing, tensors: Sequence[Tensor], heads: Heads) -> Tensor:
    """HF tensors of a `Link` -> the Megatron parameter.

    - `qkv`: `[heads*D, H]`, `[G*D, H]`, `[G*D, H]` -> `[G*(heads/G + 2)*D, H]`.
    - `gated`: twice `[I, H]` -> `[2I, H]`.
    - `transposed`: `[I, H]` -> `[H, I]`.
    - `alternating`: `[H, 2I]` -> `[2I, H]`.

    Biases alike without `H`.
    """
    if packing == "copy":
        return tensors[0]
    if packing in ("transposed", "alternating"):
        rows = tensors[0].movedim(-1, 0)
        return torch.cat([rows[::2], rows[1::2]]) if packing == "alternating" else rows.contiguous()
    if packing == "gated":
        return torch.cat(list(tensors))
    columns = tensors[0].shape[1:]
    return torch.cat([t.reshape(heads.groups, -1, *columns) for t in tensors], dim=1).reshape(-1, *columns)


def unpack(packing: Packing, tensor: Tensor, heads: Heads) -> tuple[Tensor, ...]:
    """The Megatron parameter -> HF tensors of its `Link`, contiguous; the exact inverse of `pack`."""
    if packing == "copy":
        return (tensor.contiguous(),)
    if packing in ("transposed", "alternating"):
        rows = torch.stack(tensor.chunk(2), 1).flatten(0, 1) if packing == "alternating" else tensor
        return (rows.movedim(0, -1).contiguous(),)
    if packing == "gated":
        gate, up = tensor.chunk(2)
        return gate.contiguous(), up.contiguous()
    columns = tensor.shape[1:]
    grouped = tensor.reshape(heads.groups, -1, *columns)
    query_rows = grouped.shape[1] - 2 * heads.head_dim
    parts = torch.split(grouped, [query_rows, heads.head_dim, heads.head_dim], dim=1)
    return tuple(part.reshape(-1, *columns).contiguous() for part in parts)
