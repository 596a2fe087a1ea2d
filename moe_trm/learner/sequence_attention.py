"""Causal attention inside each sequence of a pack, in plain torch. Nothing is as large as the pack squared.

Short sequences are rows of a few calls, padded on the right: one call for each would cost more than what it computes.
Long ones have a call each. A pack of short ones alone is a few batched products (`batched_attention`), on a CPU.

Shape letters: T tokens of a pack, P places of all calls, B rows of a call, C columns that ask, S columns that are seen,
N query heads, G key/value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_trm.learner.batched_attention import Blocks, attend_blocks, blocks_of

TOGETHER = 256
"""Tokens of the longest sequences that share a call, with those of the same octave of length."""

CALL = 2**15
"""Pairs of columns that cost as much as a call more: until fillers have so many, shorter sequences join a call, too.

So a call computes less than twice as many columns as it has tokens, and `CALL` over its longest sequence more.
"""

BATCHED = 128
"""Columns of the rows that are attended in batched products. The weights of longer ones would take much memory."""


@dataclass(frozen=True)
class AttentionKind:
    """The properties of a layer's attention besides that it is causal.

    Attributes:
        scale: of the logits.
        dropout: of the weights; 0 outside of training.
        columns_before: how many columns before its own a token sees; None: all of them.
        sinks: `[N]` a learned logit for each head that takes part in the softmax and has no value; None: none.
    """

    scale: float
    dropout: float = 0.0
    columns_before: int | None = None
    sinks: Tensor | None = None


@dataclass(frozen=True, eq=False)
class _Calls:
    """The calls that attend a pack.

    Attributes:
        shapes: rows and columns of each.
        tokens: `[P]` the token of the pack at each place of all calls; the last one of a sequence fills its row.
        places: `[T]` the place of each token.
        fillers: the places behind the tokens of their sequence.
    """

    shapes: tuple[tuple[int, int], ...]
    tokens: Tensor
    places: Tensor
    fillers: Tensor

    def on(self, device: torch.device) -> _Calls:
        """The same with tensors on `device`."""
        return _Calls(self.shapes, self.tokens.to(device), self.places.to(device), self.fillers.to(device))


def attend_within(
    query_TND: Tensor, key_TGD: Tensor, value_TGD: Tensor, lengths: Sequence[int], kind: AttentionKind
) -> Tensor:
    """Attention of every token over its own sequence, `[T, N, D]`; values may have another D.

    Args:
        query_TND, key_TGD, value_TGD: of the pack.
        lengths: tokens of its sequences in order, T in all.
        kind: of the layer.
    """
    calls = _calls(tuple(lengths))
    if _are_batched(calls, query_TND, kind):
        blocks = _blocks(calls, key_TGD.shape[1])
        return attend_blocks(query_TND, key_TGD, value_TGD, blocks, kind.scale, kind.columns_before)
    query, key, value = query_TND, key_TGD, value_TGD
    together = len(calls.shapes) < len(lengths)
    if together:
        calls = calls.on(query.device)
        query, key, value = (_Spread.apply(each, calls) for each in (query, key, value))  # type: ignore[no-untyped-call]
    tensors = (query, *for_all_heads(query.shape[1], key, value))
    # One split and one concatenation: slices would each have a gradient as long as the pack.
    sizes = [rows * columns for rows, columns in calls.shapes]
    found = []
    for shape, *parts in zip(calls.shapes, *(torch.split(each, sizes) for each in tensors), strict=True):
        query, key, value = (each.reshape(*shape, *each.shape[1:]) for each in parts)
        found.append(attend(query, key, value, kind).flatten(0, 1))
    context_PND = torch.cat(found) if len(found) > 1 else found[0]
    if together:
        return _Collected.apply(context_PND, calls)  # type: ignore[no-untyped-call, no-any-return]
    return context_PND


def _are_batched(calls: _Calls, query: Tensor, kind: AttentionKind) -> bool:
    """True where batched products round as torch's own kernel does: in float32."""
    is_plain = kind.sinks is None and not kind.dropout
    is_short = max(columns for _, columns in calls.shapes) <= BATCHED
    return is_plain and is_short and query.device.type == "cpu" and query.dtype == torch.float32


def for_all_heads(heads: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values `[..., G, D]` repeated for all `heads` that share them, `[..., N, D]`."""
    if key.shape[-2] == heads:
        return key, value
    repeats = heads // key.shape[-2]
    return key.repeat_interleave(repeats, -2), value.repeat_interleave(repeats, -2)


def attend(
    query_BCND: Tensor, key_BSND: Tensor, value_BSND: Tensor, kind: AttentionKind, before_CS: Tensor | None = None
) -> Tensor:
    """Attention over the row of each, `[B, C, N, D]`.

    Args:
        query_BCND: of the columns that ask.
        key_BSND, value_BSND: of whole rows.
        kind: of the layer.
        before_CS: `[C, S]` int64, how many columns each seen one is before each that asks. None: these are the same
            columns in order.
    """
    query_BNCD, key_BNSD, value_BNSD = (values.transpose(1, 2) for values in (query_BCND, key_BSND, value_BSND))
    hidden_CS = _hidden(query_BCND.shape[1], before_CS, kind, query_BCND.device)
    if kind.sinks is not None:
        context_BNCD = _with_sinks(query_BNCD, key_BNSD, value_BNSD, hidden_CS, kind, kind.sinks)
    else:
        context_BNCD = F.scaled_dot_product_attention(
            query_BNCD,
            key_BNSD,
            value_BNSD,
            attn_mask=None if hidden_CS is None else ~hidden_CS,
            dropout_p=kind.dropout,
            is_causal=hidden_CS is None,
            scale=kind.scale,
        )
    return context_BNCD.transpose(1, 2)


def _hidden(columns: int, before_CS: Tensor | None, kind: AttentionKind, device: torch.device) -> Tensor | None:
    """`[C, S]` bool, True where a column is not seen; None: just those behind, which torch's own kernel knows."""
    is_plain = kind.sinks is None and (kind.columns_before is None or columns <= kind.columns_before + 1)
    if before_CS is None:
        if is_plain:
            return None
        places = torch.arange(columns, device=device)
        before_CS = places[:, None] - places[None, :]
    hidden_CS = before_CS < 0
    return hidden_CS if kind.columns_before is None else hidden_CS | (before_CS > kind.columns_before)


def _with_sinks(
    query_BNCD: Tensor,
    key_BNSD: Tensor,
    value_BNSD: Tensor,
    hidden_CS: Tensor | None,
    kind: AttentionKind,
    sinks_N: Tensor,
) -> Tensor:
    """`w_s = exp(q.k_s * scale) / (exp(sink) + sum_t exp(q.k_t * scale))`, the softmax in float32."""
    logits_BNCS = (query_BNCD @ key_BNSD.mT * kind.scale).float()
    if hidden_CS is not None:
        logits_BNCS = logits_BNCS.masked_fill(hidden_CS, -torch.inf)
    rows, heads, columns, _ = query_BNCD.shape
    sinks_BNC1 = sinks_N.float()[None, :, None, None].expand(rows, heads, columns, 1)
    weights_BNCS = torch.cat([logits_BNCS, sinks_BNC1], -1).softmax(-1)[..., :-1].to(value_BNSD.dtype)
    if kind.dropout:
        weights_BNCS = torch.dropout(weights_BNCS, kind.dropout, train=True)
    return weights_BNCS @ value_BNSD


class _Spread(torch.autograd.Function):
    """The tokens of a pack at the places of its calls: `[T, ...]` -> `[P, ...]`.

    No token sees a filler, and what fillers ask for is dropped, so their gradient is zero and is not added up.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, calls: _Calls) -> Tensor:
        ctx.calls = calls
        return values.index_select(0, calls.tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.index_select(0, ctx.calls.places), None


class _Collected(torch.autograd.Function):
    """Inverse of `_Spread`: `[P, ...]` -> `[T, ...]`."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, calls: _Calls) -> Tensor:
        ctx.calls = calls
        return values.index_select(0, calls.places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        spread = gradient.index_select(0, ctx.calls.tokens)
        return spread.index_fill_(0, ctx.calls.fillers, 0.0), None


@lru_cache(maxsize=32)
def _calls(lengths: tuple[int, ...]) -> _Calls:
    starts = np.cumsum(lengths) - np.asarray(lengths)
    shapes, tokens, places_T, first = [], list[np.ndarray](), np.zeros(sum(lengths), np.int64), 0
    fillers = list[np.ndarray]()
    for members in _grouped(lengths):
        columns = lengths[members[0]]
        shapes.append((len(members), columns))
        for number in members:
            start, length = int(starts[number]), lengths[number]
            tokens.append(start + np.minimum(np.arange(columns), length - 1))
            places_T[start : start + length] = first + np.arange(length)
            fillers.append(np.arange(first + length, first + columns))
            first += columns
    found = (torch.from_numpy(each) for each in (np.concatenate(tokens), places_T, np.concatenate(fillers)))
    return _Calls(tuple(shapes), *found)


@lru_cache(maxsize=8)
def _blocks(calls: _Calls, groups: int) -> Blocks:
    return blocks_of(calls.shapes, calls.tokens, calls.places, calls.fillers, groups)


def _grouped(lengths: Sequence[int]) -> list[list[int]]:
    """The sequences of each call, by their numbers, the longest first. Calls of one sequence each are in order."""
    calls: list[list[int]] = []
    longest = wasted = 0
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        length = lengths[number]
        wasted += longest**2 - length**2
        alike = length.bit_length() == longest.bit_length() or wasted <= CALL
        if calls and longest <= TOGETHER and alike:
            calls[-1].append(number)
        else:
            calls.append([number])
            longest, wasted = length, 0
    return sorted(calls, key=min)
