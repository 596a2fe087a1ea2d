"""Reductions over the sampled tokens of each row. Shape letters: B sequences, T tokens.

"Length" is always the number of sampled tokens: prompt, tool and padding positions never count. Rows without sampled
tokens give 0. Values off the mask may be anything.
"""

from __future__ import annotations

import torch
from torch import Tensor


def num_tokens(mask: Tensor) -> Tensor:
    """Sampled tokens of each row, `[B]` int64."""
    return mask.sum(dim=1)


def row_sum(values: Tensor, mask: Tensor) -> Tensor:
    """`sum_t m_t x_t`, `[B]`."""
    return torch.where(mask, values, 0.0).sum(dim=1)


def row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """`sum_t m_t x_t / max(sum_t m_t, 1)`, `[B]`: neutral to length, so tiling a row changes nothing."""
    return row_sum(values, mask) / num_tokens(mask).clamp(min=1)


def row_max(values: Tensor, mask: Tensor) -> Tensor:
    """`max_{t: m_t} x_t`, `[B]`; NaN on the mask wins."""
    if values.shape[1] == 0:
        return values.new_zeros(values.shape[0])
    top = torch.where(mask, values, float("-inf")).amax(dim=1)
    return torch.where(mask.any(dim=1), top, 0.0)


def token_rank(mask: Tensor) -> Tensor:
    """Position 1..T_i of each sampled token among the sampled tokens of its row, `[B, T]` int64; arbitrary off the
    mask.
    """
    return mask.cumsum(dim=1)


def over_tokens(per_row: Tensor, mask: Tensor) -> Tensor:
    """A value of each row spread over its tokens, `[B, T]`."""
    return per_row[:, None].expand(mask.shape)
