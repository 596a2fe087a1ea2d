"""All layers of a plain Qwen3-MoE model in one loop, with some forty calls of torch for each.

SGLang passes through a dozen modules per layer, each of which asks what it is to do on this machine. For a small model
that takes several times longer than the arithmetic. The arithmetic here is SGLang's: the same products, sums and
roundings, up to the order of sums.

Shape letters: N tokens, D hidden size, H heads, G key/value heads, A head dimension, E experts, K experts per token, F
expert width, C places per expert.
"""

from __future__ import annotations

from collections.abc import Callable, MutableSequence, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from moe_trm_sglang_cpu.batched_experts import places, tokens_of_places
from moe_trm_sglang_cpu.layer_matrices import LayerMatrices
from moe_trm_sglang_cpu.norms import normed

FEW_CHOICES = 8
"""Choices of a pass up to which a product for each is faster."""
MOST_PLACES = 48
"""Places per expert up to which one product for all experts is faster than one for each."""
MOST_PADDING = 4
"""The same of places per choice."""
FEW_PLACES = 1 << 9
"""Places of all experts up to which their number does not matter."""

Attend = Callable[[Any, Tensor, Tensor, Tensor], Tensor]
"""Attention of a layer: SGLang's module, queries `[N, H, A]`, keys and values `[N, G, A]`, to `[N, H * A]`."""
Chosen = MutableSequence[Tensor]
"""Chosen experts of each layer, `[N, K]`."""
Turn = tuple[Tensor, Tensor]
"""Cosines and signed sines of the tokens, `[N, 1, A]`, of `norms.signed_turn`."""


def through_layers(
    hidden_ND: Tensor,
    layers: Sequence[LayerMatrices],
    last_norm_D: Tensor,
    turn: Turn,
    attend: Attend,
    chosen: Chosen | None,
) -> Tensor:
    """The hidden states behind the last norm, `[N, D]`.

    Args:
        hidden_ND: embedded tokens.
        layers: in their order.
        last_norm_D: weight of the norm behind the last layer.
        turn: rotation of queries and keys.
        attend: the attention.
        chosen: takes the choice of each layer.
    """
    dtype, eps = hidden_ND.dtype, layers[0].eps
    residual_ND, wide_ND = hidden_ND, hidden_ND.float()
    for layer in layers:
        mixed_ND = _mixed(normed(wide_ND, layer.input_norm, eps).to(dtype), layer, turn, attend)
        wide_ND = mixed_ND.float() + residual_ND
        residual_ND = wide_ND.to(dtype)
        experts_ND = _experts(normed(wide_ND, layer.output_norm, eps).to(dtype), layer, chosen)
        wide_ND = experts_ND.float() + residual_ND
        residual_ND = wide_ND.to(dtype)
    return normed(wide_ND, last_norm_D, eps).to(dtype)


def _product(x: Tensor, matrix: Tensor) -> Tensor:
    """x times a float32 matrix, or matrices, rounded to the dtype of x."""
    multiply = torch.mm if matrix.dim() == 2 else torch.bmm
    return multiply(x, matrix) if x.dtype is torch.float32 else multiply(x.float(), matrix).to(x.dtype)


def _mixed(x_ND: Tensor, layer: LayerMatrices, turn: Turn, attend: Attend) -> Tensor:
    """Attention with normed and rotated queries and keys."""
    num_turning, width = layer.head_norms.shape
    heads = _product(x_ND, layer.qkv).view(x_ND.shape[0], -1, width)
    turning = normed(heads[:, :num_turning].float(), layer.head_norms, layer.eps).to(x_ND.dtype)
    swapped = torch.cat((turning[..., width // 2 :], turning[..., : width // 2]), -1)
    turned = (turning * turn[0]).add_(swapped.mul_(turn[1]))
    query, key = turned[:, : layer.heads], turned[:, layer.heads :]
    return _product(attend(layer.attention, query, key, heads[:, num_turning:]), layer.out)


def _experts(x_ND: Tensor, layer: LayerMatrices, chosen: Chosen | None) -> Tensor:
    """The weighed sum of the experts that the gate chooses for each token."""
    weights_NK, ids_NK = _product(x_ND, layer.gate).float().softmax(-1).topk(layer.top_k)
    if layer.renormalize:
        weights_NK.div_(weights_NK.sum(-1, keepdim=True))
    if chosen is not None:
        chosen.append(ids_NK)
    num_choices, num_experts = ids_NK.numel(), layer.w13.shape[0]
    if num_choices <= FEW_CHOICES:
        out = _each(x_ND, ids_NK, layer)
    else:
        found, capacity = places(ids_NK, num_experts)
        if capacity <= MOST_PLACES and capacity * num_experts <= MOST_PADDING * num_choices + FEW_PLACES:
            out = _together(x_ND, ids_NK, layer, found, capacity)
        else:
            out = _one_by_one(x_ND, ids_NK, layer)
    return (out.view(*ids_NK.shape, -1) * weights_NK.unsqueeze(-1)).sum(1).to(x_ND.dtype)


def _gated(both: Tensor) -> Tensor:
    """silu(gate) * up of both, side by side."""
    gate, up = both.chunk(2, -1)
    return functional.silu(gate).mul_(up)


def _each(x_ND: Tensor, ids_NK: Tensor, layer: LayerMatrices) -> Tensor:
    """Outputs of the choices, `[N * K, D]`, each with its own matrices."""
    ids = [expert for choice in ids_NK.tolist() for expert in choice]
    rows, dtype = x_ND.float().split(1), x_ND.dtype
    both = [torch.mm(rows[place // layer.top_k], layer.each_w13[expert]) for place, expert in enumerate(ids)]
    inner = _gated(torch.cat(both).to(dtype)).float().split(1)
    return torch.cat([torch.mm(row, layer.each_w2[expert]) for row, expert in zip(inner, ids, strict=True)]).to(dtype)


def _together(x_ND: Tensor, ids_NK: Tensor, layer: LayerMatrices, found: Tensor, capacity: int) -> Tensor:
    """Outputs of the choices, `[N * K, D]`, in as many places for each expert as the one with most tokens needs."""
    num_experts = layer.w13.shape[0]
    tokens = tokens_of_places(found, num_experts * capacity, ids_NK.shape)
    rows = x_ND.index_select(0, tokens).view(num_experts, capacity, -1)
    return _product(_gated(_product(rows, layer.w13)), layer.w2).flatten(0, 1).index_select(0, found)


def _one_by_one(x_ND: Tensor, ids_NK: Tensor, layer: LayerMatrices) -> Tensor:
    """Outputs of the choices, `[N * K, D]`, expert by expert over its own tokens."""
    ids = ids_NK.view(-1)
    order, sizes = ids.argsort(stable=True), torch.bincount(ids, minlength=len(layer.w13)).tolist()
    rows = x_ND.index_select(0, order // ids_NK.shape[1])
    sorted_out = _products(_gated(_products(rows, sizes, layer.each_w13)), sizes, layer.each_w2)
    return torch.empty_like(sorted_out).index_copy_(0, order, sorted_out)


def _products(rows: Tensor, sizes: Sequence[int], matrices: Sequence[Tensor]) -> Tensor:
    """The rows of each expert times its matrix, rounded to the dtype of the rows."""
    wide = rows.float()
    out = wide.new_empty(len(rows), matrices[0].shape[1])
    start = 0
    for size, matrix in zip(sizes, matrices, strict=True):
        if size:
            torch.mm(wide[start : start + size], matrix, out=out[start : start + size])
        start += size
    return out.to(rows.dtype)
