"""Causal attention inside each sequence of a pack, in plain torch. Nothing is as large as the pack squared.

Short sequences of like length are rows of one call, padded on the right: one call for each would cost more than what
it computes. Long ones have a call each.

Shape letters: T tokens of a pack, P places of all calls, B rows of a call, C columns that ask, S columns that are seen,
N query heads, G key/value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

TOGETHER = 256
"""Tokens of the longest sequences that share a call, with those of the same octave of length."""


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


def attend_within(
    query_TND: Tensor, key_TGD: Tensor, value_TGD: Tensor, lengths: Sequence[int], kind: AttentionKind
) -> Tensor:
    """Attention of every token over its own sequence, `[T, N, D]`; values may have another D.

    Args:
        query_TND, key_TGD, value_TGD: of the pack.
        lengths: tokens of its sequences in order, T in all.
        kind: of the layer.
    """
    shapes, tokens_P, places_T = calls(tuple(lengths))
    tokens_P, places_T = (index.to(query_TND.device) for index in (tokens_P, places_T))
    # One index and one split: slices would each have a gradient as long as the pack.
    parts = (
        tensor.index_select(0, tokens_P).split_with_sizes([rows * columns for rows, columns in shapes])
        for tensor in (query_TND, *for_all_heads(query_TND.shape[1], key_TGD, value_TGD))
    )
    outputs = [
        attend(query.unflatten(0, shape), key.unflatten(0, shape), value.unflatten(0, shape), kind).flatten(0, 1)
        for shape, query, key, value in zip(shapes, *parts, strict=True)
    ]
    return torch.cat(outputs).index_select(0, places_T)


@lru_cache(maxsize=32)
def calls(lengths: tuple[int, ...]) -> tuple[list[tuple[int, int]], Tensor, Tensor]:
    """Rows and columns of the calls for sequences of these lengths.

    With them `[P]` the token at each place of all calls, where the last one of a sequence fills its row, and `[T]` the
    place of each token. No token sees a filler, and what fillers ask for is dropped.
    """
    calls: dict[int, list[Tensor]] = {}
    for number, places in enumerate(torch.arange(sum(lengths)).split_with_sizes(lengths)):
        calls.setdefault(len(places).bit_length() if len(places) <= TOGETHER else -number, []).append(places)
    rows = [pad_sequence(members, batch_first=True, padding_value=-1) for members in calls.values()]
    is_token_P = torch.cat([row.flatten() for row in rows]) >= 0
    tokens_P = torch.cat([row.cummax(1).values.flatten() for row in rows])
    places_T = torch.empty(sum(lengths), dtype=torch.int64)
    places_T[tokens_P[is_token_P]] = is_token_P.nonzero()[:, 0]
    return [(len(row), row.shape[1]) for row in rows], tokens_P, places_T


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
