"""Attention of one query per request over its cached tokens, for all requests at once, in torch.

Shape letters: B requests, S cached tokens of the longest one, H heads, G key/value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


@dataclass(frozen=True)
class Together:
    """Requests that are computed in one call: none is shorter than half of the longest."""

    rows: Tensor
    """`[B]` places in the batch."""
    slots: Tensor
    """`[B, S]` places in the cache; behind the end of a request any place that exists."""
    seen: Tensor
    """`[B, S]`, False behind the end of a request."""


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
    lots = []
    for rows in in_lots(lengths_B):
        lengths = lengths_B[rows]
        longest = int(lengths[0])
        seen = torch.arange(longest) < lengths[:, None]
        slots = slots_of_rows[pool_rows_B[rows], :longest].to(torch.int64)
        lots.append(Together(rows, slots.masked_fill_(~seen, int(slots[0, 0])), seen))
    return lots


def decode(query_BHD: Tensor, keys: Tensor, values: Tensor, lots: list[Together], scaling: float) -> Tensor:
    """Attention of one query per request over its cached tokens, `[B, H, D]`.

    Args:
        query_BHD: the last token of each request.
        keys: `[slots, G, D]`, the cache.
        values: likewise.
        lots: of `plan`.
        scaling: of the scores.
    """
    (num_requests, num_heads, dim), groups = query_BHD.shape, keys.shape[1]
    out_BHD = query_BHD.new_empty(num_requests, num_heads, values.shape[-1])
    for lot in lots:
        # The heads that share a key are its queries.
        query = query_BHD[lot.rows].view(-1, groups, num_heads // groups, dim)
        key_BGSD, value_BGSD = (gather(cache, lot.slots).to(query.dtype) for cache in (keys, values))
        out = scaled_dot_product_attention(
            query, key_BGSD, value_BGSD, attn_mask=lot.seen[:, None, None], scale=scaling
        )
        out_BHD[lot.rows] = out.reshape(-1, num_heads, values.shape[-1])
    return out_BHD


def gather(cache: Tensor, slots_BS: Tensor) -> Tensor:
    """The entries of a cache `[slots, G, D]` at these places, `[B, G, S, D]`. Selecting whole rows is fastest."""
    found = cache.flatten(1).index_select(0, slots_BS.flatten())
    return found.view(*slots_BS.shape, *cache.shape[1:]).transpose(1, 2)
