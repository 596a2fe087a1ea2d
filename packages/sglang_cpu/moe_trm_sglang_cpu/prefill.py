"""Causal attention of the new tokens of each request over its cached tokens, for all requests at once, in torch.

Shape letters: N new tokens of the pass, B requests of a lot, T new tokens of the one with most, S cached tokens of the
longest, H heads, G key/value heads, D head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from moe_trm_sglang_cpu.decoding import gather, in_lots

MOST_PAIRS = 1 << 22
"""Query and key pairs of a lot beyond which a call for each request is as fast."""


@dataclass(frozen=True)
class Prefill:
    """Requests that are computed in one call."""

    tokens: Tensor
    """`[B, T]` places among the new tokens of the pass; behind the end of a request its last one."""
    real: Tensor
    """`[B, T]`, False behind the end of a request."""
    slots: Tensor
    """`[B, S]` places in the cache; behind the end of a request any place that exists."""
    seen: Tensor
    """`[B, T, S]`: the keys that each query sees."""


def plan(slots_of_rows: Tensor, pool_rows_B: Tensor, lengths_B: Tensor, new_B: Tensor) -> list[Prefill]:
    """The lots of a pass; none where a lot would be too large.

    Args:
        slots_of_rows: `[rows, longest]`, the place of each token of each row in the cache.
        pool_rows_B: row of each request.
        lengths_B: cached tokens of each request, the new ones included.
        new_B: new tokens of each request, at least one. They follow each other in the pass.
    """
    firsts_B, lots = new_B.cumsum(0) - new_B, []
    for rows in in_lots(lengths_B):
        lengths, new = lengths_B[rows], new_B[rows]
        longest, most = int(lengths[0]), int(new.max())
        if len(rows) * most * longest > MOST_PAIRS:
            return []
        query, key = torch.arange(most), torch.arange(longest)
        inside = key < lengths[:, None]
        slots = slots_of_rows[pool_rows_B[rows], :longest].to(torch.int64)
        place = torch.minimum(query, new[:, None] - 1)
        seen = key <= ((lengths - new)[:, None] + place)[..., None]
        slots = slots.masked_fill_(~inside, int(slots[0, 0]))
        lots.append(Prefill(firsts_B[rows, None] + place, query < new[:, None], slots, seen))
    return lots


def prefill(query_NHD: Tensor, keys: Tensor, values: Tensor, lots: list[Prefill], scaling: float) -> Tensor:
    """Causal attention of the new tokens, `[N, H, D]`.

    Args:
        query_NHD: the new tokens, request after request.
        keys: `[slots, G, D]`, the cache with the new tokens in it.
        values: likewise.
        lots: of `plan`.
        scaling: of the scores.
    """
    (num_tokens, num_heads, dim), groups = query_NHD.shape, keys.shape[1]
    out_NHD = query_NHD.new_empty(num_tokens, num_heads, values.shape[-1])
    for lot in lots:
        num_requests, most = lot.tokens.shape
        query = query_NHD[lot.tokens].view(num_requests, most, groups, num_heads // groups, dim)
        # The heads that share a key are its queries, one after the other.
        query = query.permute(0, 2, 3, 1, 4).reshape(num_requests, groups, -1, dim)
        mask = lot.seen[:, None].expand(-1, num_heads // groups, -1, -1).reshape(num_requests, 1, -1, lot.seen.shape[2])
        key_BGSD, value_BGSD = (
            gather(cache, lot.slots.flatten(), lot.slots.shape[1]).to(query.dtype) for cache in (keys, values)
        )
        out = scaled_dot_product_attention(query, key_BGSD, value_BGSD, attn_mask=mask, scale=scaling)
        out = out.view(num_requests, num_heads, most, -1).transpose(1, 2)
        out_NHD[lot.tokens[lot.real]] = out[lot.real]
    return out_NHD
