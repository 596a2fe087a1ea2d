"""Causal attention of short rows as a few batched products, in plain torch, with a gradient of its own.

A kernel that walks over rows, heads and blocks of columns spends most of its time between them where rows are short.
Here all rows of a call are one product, and all heads that share a key are rows of one matrix, so that keys and values
are not repeated. The weights are kept for backward: `N * C` numbers of a token.

Shape letters: T tokens of a pack, P places of all calls, B rows of a call, C columns of its rows, N query heads, G
key/value heads, R = N / G heads that share one, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True)
class Blocks:
    """The calls that attend a pack, each with its places in the order `[B, G, C]`.

    Places and tokens are counted by key/value heads: token `t` is rows `t * G` to `t * G + G - 1` of `[T * G, ...]`.

    Attributes:
        shapes: rows and columns of each call.
        tokens: `[P * G]` the token at each place; the last one of a sequence fills its row.
        places: `[T * G]` the place of each token.
        fillers: the places behind the tokens of their sequence.
    """

    shapes: tuple[tuple[int, int], ...]
    tokens: Tensor
    places: Tensor
    fillers: Tensor


def blocks_of(
    shapes: Sequence[tuple[int, int]], tokens_P: Tensor, places_T: Tensor, fillers: Tensor, groups: int
) -> Blocks:
    """The same calls with `groups` key/value heads, from places in the order `[B, C]`."""
    by_place, first = [], 0
    for rows, columns in shapes:
        places = torch.arange(first, first + rows * groups * columns).view(rows, groups, columns)
        by_place.append(places.transpose(1, 2).reshape(-1, groups))
        first += places.numel()
    place_PG = torch.cat(by_place)
    tokens = torch.empty(first, dtype=torch.int64)
    tokens[place_PG] = tokens_P[:, None] * groups + torch.arange(groups)
    return Blocks(tuple(shapes), tokens, place_PG[places_T].flatten(), place_PG[fillers].flatten())


def attend_blocks(
    query_TND: Tensor, key_TGD: Tensor, value_TGD: Tensor, blocks: Blocks, scale: float, columns_before: int | None
) -> Tensor:
    """Softmax attention of every token over its own row up to itself, `[T, N, D]`; values may have another D.

    Args:
        query_TND, key_TGD, value_TGD: of the pack, on a CPU.
        blocks: for its G.
        scale: of the logits.
        columns_before: how many columns before its own a token sees; None: all of them.
    """
    found: Tensor = _Attended.apply(query_TND, key_TGD, value_TGD, blocks, scale, columns_before)  # type: ignore[no-untyped-call]
    return found


class _Attended(torch.autograd.Function):
    """w = softmax(scale q k^T + hidden), y = w v. No token sees a filler, and what fillers ask for is dropped."""

    @staticmethod
    def forward(
        ctx: Any,
        query_TND: Tensor,
        key_TGD: Tensor,
        value_TGD: Tensor,
        blocks: Blocks,
        scale: float,
        columns_before: int | None,
    ) -> Tensor:
        groups, value_dim = key_TGD.shape[1], value_TGD.shape[2]
        repeats = query_TND.shape[1] // groups
        query, key, value = (_spread(values, blocks, groups) for values in (query_TND, key_TGD, value_TGD))
        query.mul_(scale)
        context = query.new_empty(len(query), repeats * value_dim)
        weights = []
        for (_, columns), q, k, v, own in zip(
            blocks.shapes,
            _calls(query, blocks, query_TND.shape[2]),
            _calls(key, blocks, key_TGD.shape[2]),
            _calls(value, blocks, value_dim),
            _calls(context, blocks, value_dim),
            strict=True,
        ):
            hidden = _hidden(columns, repeats, columns_before, query.dtype)
            weights.append(torch.bmm(q, k.mT).add_(hidden).softmax(-1))
            torch.bmm(weights[-1], v, out=own)
        ctx.save_for_backward(query, key, value, *weights)
        ctx.blocks, ctx.scale, ctx.shapes = blocks, scale, (query_TND.shape, key_TGD.shape, value_TGD.shape)
        return _collected(context, blocks, (*query_TND.shape[:2], value_dim))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_TND: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *weights = ctx.saved_tensors
        blocks: Blocks = ctx.blocks
        (*_, head_dim), (_, groups, _), (*_, value_dim) = ctx.shapes
        gradient = _spread(gradient_TND, blocks, groups).index_fill_(0, blocks.fillers, 0.0)
        to_query, to_key, to_value = (torch.empty_like(values) for values in (query, key, value))
        for w, g, q, k, v, to_q, to_k, to_v in zip(
            weights,
            _calls(gradient, blocks, value_dim),
            *(_calls(values, blocks, head_dim) for values in (query, key)),
            _calls(value, blocks, value_dim),
            *(_calls(values, blocks, head_dim) for values in (to_query, to_key)),
            _calls(to_value, blocks, value_dim),
            strict=True,
        ):
            torch.bmm(w.mT, g, out=to_v)
            to_logits = torch._softmax_backward_data(torch.bmm(g, v.mT), w, -1, w.dtype)
            torch.bmm(to_logits, k, out=to_q)
            torch.bmm(to_logits.mT, q, out=to_k)
        found = (to_query.mul_(ctx.scale), to_key, to_value)
        return (*(_collected(one, blocks, shape) for one, shape in zip(found, ctx.shapes, strict=True)), *[None] * 3)


def _spread(values: Tensor, blocks: Blocks, groups: int) -> Tensor:
    """`[T, ...]` -> `[P * G, ...]`; the heads that share a key stay together."""
    return values.reshape(len(values) * groups, -1).index_select(0, blocks.tokens)


def _collected(values: Tensor, blocks: Blocks, shape: Sequence[int]) -> Tensor:
    """`[P * G, ...]` -> `[T, ...]` of this shape."""
    return values.index_select(0, blocks.places).view(*shape)


def _calls(values: Tensor, blocks: Blocks, dim: int) -> list[Tensor]:
    """`[P * G, ...]` as one `[B * G, C * R, dim]` for each call, `[B * G, C, dim]` of keys and values."""
    groups = len(values) // sum(rows * columns for rows, columns in blocks.shapes)
    sizes = [rows * columns * groups for rows, columns in blocks.shapes]
    return [
        part.view(rows * groups, -1, dim)
        for part, (rows, _) in zip(torch.split(values, sizes), blocks.shapes, strict=True)
    ]


@lru_cache(maxsize=64)
def _hidden(columns: int, repeats: int, columns_before: int | None, dtype: torch.dtype) -> Tensor:
    """`[C * R, C]`: minus infinity where a column is not seen, else 0."""
    places = torch.arange(columns)
    before_CC = places[:, None] - places[None]
    is_hidden = before_CC < 0
    if columns_before is not None:
        is_hidden |= before_CC > columns_before
    hidden_CC = torch.zeros(columns, columns, dtype=dtype).masked_fill_(is_hidden, -torch.inf)
    return hidden_CC.repeat_interleave(repeats, 0)
