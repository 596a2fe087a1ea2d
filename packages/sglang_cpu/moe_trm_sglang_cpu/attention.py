"""Causal attention of one request in torch, with the sinks and windows of gpt-oss.

Shape letters: T query tokens, S cached tokens, H heads, G key/value heads, D head dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor


def attention(
    query_THD: Tensor, key_SGD: Tensor, value_SGD: Tensor, scaling: float, window: int, sinks_H: Tensor | None
) -> Tensor:
    """Causal attention of the last T of S tokens, in float32: `[T, H, D]`.

    `softmax([scaling * q k, sink])` without its last weight, times v. A token sees itself and `window` tokens before
    it; -1: all of them.
    """
    (num_queries, num_heads, dim), (length, groups, _) = query_THD.shape, key_SGD.shape
    query = query_THD.float().view(num_queries, groups, num_heads // groups, dim)
    scores = scaling * torch.einsum("tghd,sgd->ghts", query, key_SGD.float())
    asking, asked = torch.arange(length - num_queries, length)[:, None], torch.arange(length)
    unseen = (asked > asking) | ((window >= 0) & (asked < asking - window))
    scores = scores.masked_fill(unseen, float("-inf"))
    if sinks_H is not None:
        sinks = sinks_H.float().view(groups, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], -1)
    weights = scores.softmax(-1)[..., :length]
    out = torch.einsum("ghts,sgd->tghd", weights, value_SGD.float())
    return out.reshape(num_queries, num_heads, -1).to(query_THD.dtype)
