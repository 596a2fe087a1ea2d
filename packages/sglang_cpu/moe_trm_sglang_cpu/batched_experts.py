"""Plain SwiGLU experts for SGLang's torch-native mixture of experts: in two batched products, or expert by expert.

SGLang's own makes two dozen calls for each expert, which cost more than the products of a few tokens. Imported by
SGLang's scheduler only.

Shape letters: N tokens, K experts per token, E experts, C places per expert, D hidden size, F expert width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

MOST_PADDING = 8
"""Places per choice up to which the batched products are faster."""
MOST_PLACES = 24
"""The same of places per expert: where a few experts have most tokens, the others compute as many places for nobody."""
SMALL_MATRIX = 1 << 18
"""Numbers of a matrix up to which a product is faster in float32: converted, it stays in a core's cache."""
FEW_ROWS = 32
"""Tokens of an expert, in the mean, up to which a product is faster in float32, its matrix converted."""
MOST_MARKS = 1 << 14
"""Pairs of a choice and an expert up to which counting with a table is faster than sorting."""


def places(ids_NK: Tensor, num_experts: int) -> tuple[Tensor, int]:
    """The place of each token at each of its experts, `[N * K]`, and C. Expert e has the places from e * C on.

    The tokens of an expert keep their order.
    """
    ids = ids_NK.reshape(-1).to(torch.int64)
    if ids.shape[0] * num_experts <= MOST_MARKS:
        counted = (ids[:, None] == _numbers(num_experts)).cumsum(0)
        capacity = int(counted[-1].max())
        return counted.gather(1, ids[:, None]).squeeze(1).add_(ids, alpha=capacity).sub_(1), capacity
    sorted_ids, order = ids.sort(stable=True)
    counts_E = torch.bincount(ids, minlength=num_experts)
    capacity = int(counts_E.max())
    firsts_E = counts_E.cumsum(0) - counts_E
    found = torch.empty_like(ids)
    found[order] = sorted_ids * capacity + torch.arange(len(ids)) - firsts_E[sorted_ids]
    return found, capacity


@lru_cache(maxsize=8)
def _numbers(count: int) -> Tensor:
    return torch.arange(count)


@lru_cache(maxsize=128)
def _owners(num_tokens: int, top_k: int) -> Tensor:
    """The token of each choice, `[N * K]`."""
    return torch.arange(num_tokens).repeat_interleave(top_k)


def tokens_of_places(found: Tensor, num_places: int, choices: torch.Size) -> Tensor:
    """The token at each place, found by `places`. Nobody has some: what is computed there, the first's, is not read."""
    return torch.zeros(num_places, dtype=torch.int64).scatter_(0, found, _owners(*choices))


def batched(x_ND: Tensor, weights_NK: Tensor, w13_EFD: Tensor, w2_EDF: Tensor, found: Tensor, capacity: int) -> Tensor:
    """sum_k w_k * W2 (silu(W1 x) * W3 x) over the experts of each token, `[N, D]`, in the precision of SGLang's loop.

    Args:
        x_ND: tokens.
        weights_NK: gate weights.
        w13_EFD: W1 above W3, `[E, 2 F, D]`.
        w2_EDF: W2, `[E, D, F]`.
        found: of `places`.
        capacity: of `places`.
    """
    num_experts = len(w13_EFD)
    tokens = tokens_of_places(found, num_experts * capacity, weights_NK.shape)
    chosen = x_ND.index_select(0, tokens).view(num_experts, capacity, -1)
    gate, up = torch.bmm(chosen, w13_EFD.transpose(1, 2)).chunk(2, -1)
    out = torch.bmm(functional.silu(gate).mul_(up), w2_EDF.transpose(1, 2)).flatten(0, 1)
    return _weighed(out.index_select(0, found), weights_NK).to(x_ND.dtype)


def one_by_one(x_ND: Tensor, weights_NK: Tensor, w13_EFD: Tensor, w2_EDF: Tensor, ids_NK: Tensor) -> Tensor:
    """As `batched`, with a product per matrix of each expert, over the rows of its tokens alone.

    Each product is rounded to the dtype of the tokens, whatever it was computed in.
    """
    ids = ids_NK.reshape(-1)
    order, sizes = ids.argsort(stable=True), torch.bincount(ids, minlength=len(w13_EFD)).tolist()
    few = len(ids) <= FEW_ROWS * len(w13_EFD) and w13_EFD[0].numel() <= SMALL_MATRIX
    dtype = torch.float32 if few else x_ND.dtype
    chosen = x_ND.to(dtype).index_select(0, order // weights_NK.shape[1])
    gate, up = _products(chosen, sizes, w13_EFD).to(x_ND.dtype).chunk(2, -1)
    sorted_out = _products(functional.silu(gate).mul_(up).to(dtype), sizes, w2_EDF).to(x_ND.dtype)
    out = torch.empty_like(sorted_out).index_copy_(0, order, sorted_out)
    return _weighed(out, weights_NK).to(x_ND.dtype)


def _products(rows: Tensor, sizes: list[int], matrices: Tensor) -> Tensor:
    """The rows of each expert times its transposed matrix."""
    out = rows.new_empty(len(rows), matrices.shape[1])
    for own, matrix, into in zip(torch.split(rows, sizes), matrices, torch.split(out, sizes), strict=True):
        if len(own):
            torch.mm(own, matrix.to(rows.dtype).t(), out=into)
    return out


def _weighed(out: Tensor, weights_NK: Tensor) -> Tensor:
    """The sum of each token's outputs, `[N * K, D]`, times its gate weights."""
    out_NKD = out.view(*weights_NK.shape, -1).to(weights_NK.dtype)
    return out_NKD.mul_(weights_NK.unsqueeze(-1)).sum(1)


def around(native: Callable[..., Tensor], layer: Any, x: Tensor, topk_output: Any, moe_runner_config: Any) -> Tensor:
    """Hook around SGLang's `moe_forward_native`, which is `native`: plain SwiGLU experts in fewer calls."""
    weights, ids, _ = topk_output
    plain = (
        moe_runner_config.activation == "silu"
        and moe_runner_config.gemm1_alpha is None
        and not moe_runner_config.apply_router_weight_on_input
        and getattr(layer, "w13_weight_bias", None) is None
        and getattr(layer, "w2_weight_bias", None) is None
    )
    if not (plain and ids.numel()):
        return native(layer, x, topk_output, moe_runner_config)
    most = int(torch.bincount(ids.reshape(-1)).max())
    if most <= MOST_PLACES and most * layer.num_experts <= MOST_PADDING * ids.numel():
        return batched(x, weights, layer.w13_weight, layer.w2_weight, *places(ids, layer.num_experts))
    return one_by_one(x, weights, layer.w13_weight, layer.w2_weight, ids)
