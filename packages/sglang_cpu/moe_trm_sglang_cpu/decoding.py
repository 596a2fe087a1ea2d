"""Attention of one query per request over its cached tokens, for all requests at once, in torch.

Shape letters: B requests, S cached tokens of the longest one, H heads, G key/value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

FEW_PLACES = 1 << 12
"""Places of a batch, padding included, up to which one call is faster than several without padding."""


@dataclass(frozen=True)
class Together:
    """Requests that are computed in one call: few tokens in all, or none shorter than half of the longest."""

    rows: Tensor | None
    """`[B]` places in the batch; None: all of it, in its order."""
    slots: Tensor
    """`[B * S]` places in the cache; behind the end of a request any place that exists."""
    unseen: Tensor
    """`[B, 1, 1, S]`: minus infinity behind the end of a request, else 0."""


def in_lots(lengths_B: Tensor) -> Iterator[Tensor]:
    """Places of the requests, in lots of lengths within a factor of two: at most half of a lot is padding."""
    lengths, order = lengths_B.sort(descending=True)
    start = 0
    while start < len(lengths):
        end = int((2 * lengths[start:] >= lengths[start]).sum()) + start
        yield order[start:end]
        start = end


def plan(slots_of_rows: Tensor, pool_rows_B: Tensor, lengths_B: Tensor) -> list[Together]:
    """The lots of a batch.

    Args:
        slots_of_rows: `[rows, longest]`, the place of each token of each row in the cache.
        pool_rows_B: row of each request.
        lengths_B: cached tokens of each request, the one that asks included.
    """
    shortest, longest = (int(length) for length in lengths_B.aminmax())
    if longest <= 2 * shortest or longest * len(lengths_B) <= FEW_PLACES:
        return [_together(None, slots_of_rows[:, :longest].index_select(0, pool_rows_B), lengths_B)]
    lots = []
    for rows in in_lots(lengths_B):
        lengths = lengths_B[rows]
        slots = slots_of_rows[:, : int(lengths[0])].index_select(0, pool_rows_B[rows])
        lots.append(_together(rows, slots, lengths))
    return lots


def _together(rows: Tensor | None, slots_BS: Tensor, lengths_B: Tensor) -> Together:
    behind = torch.arange(slots_BS.shape[1]) >= lengths_B[:, None]
    slots = slots_BS.to(torch.int64)
    # The first request has a first token.
    slots = slots.masked_fill_(behind, int(slots[0, 0])).flatten()
    unseen = torch.zeros(behind.shape).masked_fill_(behind, float("-inf"))
    return Together(rows, slots, unseen[:, None, None])


def decode(query_BHD: Tensor, keys: Tensor, values: Tensor, lots: list[Together], scaling: float) -> Tensor:
    """Attention of one query per request over its cached tokens, `[B, H, D]`.

    Args:
        query_BHD: the last token of each request.
        keys: `[slots, G, D]`, the cache.
        values: likewise.
        lots: of `plan`.
        scaling: of the scores.
    """
    out_BHD = query_BHD.new_empty(*query_BHD.shape[:2], values.shape[-1])
    for lot in lots:
        if lot.rows is None:
            return _attend(query_BHD, keys, values, lot, scaling)
        out_BHD[lot.rows] = _attend(query_BHD[lot.rows], keys, values, lot, scaling)
    return out_BHD


def _attend(query_BHD: Tensor, keys: Tensor, values: Tensor, lot: Together, scaling: float) -> Tensor:
    (num_requests, num_heads, dim), groups = query_BHD.shape, keys.shape[1]
    # The heads that share a key are its queries.
    query = query_BHD.reshape(num_requests, groups, num_heads // groups, dim)
    longest = lot.unseen.shape[-1]
    key_BGSD, value_BGSD = (gather(cache, lot.slots, longest).to(query.dtype) for cache in (keys, values))
    out = scaled_dot_product_attention(query, key_BGSD, value_BGSD, attn_mask=lot.unseen, scale=scaling)
    return out.reshape(num_requests, num_heads, values.shape[-1])


def gather(cache: Tensor, slots: Tensor, longest: int) -> Tensor:
    """The entries of a cache `[slots, G, D]` at the places `[B * S]`, `[B, G, S, D]`. Whole rows are fastest."""
    gathered = cache.flatten(1).index_select(0, slots)
    return gathered.view(-1, longest, *cache.shape[1:]).transpose(1, 2)
