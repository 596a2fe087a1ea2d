"""Sampled tokens without their padding.

Shape letters: B rows, T columns, N sampled tokens, R runs of neighbouring ones.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

TOKENS_PER_RUN = 32
"""Runs at least this long, on average, are copied as slices; shorter ones are gathered by index."""


class Packing:
    """Places of the True positions of a bool `mask` `[B, T]`.

    Attributes:
        lengths: `[B]` int64, sampled tokens of each row.
        num_tokens: N.
    """

    def __init__(self, mask: Tensor) -> None:
        starts, ends = _runs(mask)
        self.lengths = torch.zeros(len(mask), dtype=torch.int64, device=mask.device)
        if mask.shape[1]:
            self.lengths.index_add_(0, starts // mask.shape[1], ends - starts)
        self.num_tokens = int(self.lengths.sum())
        self._spans: list[tuple[int, int]] | None = None
        if len(starts) * TOKENS_PER_RUN <= self.num_tokens:
            self._spans = list(zip(starts.tolist(), ends.tolist(), strict=True))
        else:
            self._index = mask.flatten().nonzero()[:, 0]

    @cached_property
    def some(self) -> Tensor:
        """`[B]` bool, rows with a sampled token."""
        return self.lengths > 0

    @cached_property
    def row_count(self) -> Tensor:
        """Number of rows with a sampled token, 0-d float64."""
        return self.some.count_nonzero().double()

    @cached_property
    def token_count(self) -> Tensor:
        """N as 0-d float64."""
        return torch.tensor(self.num_tokens, dtype=torch.float64, device=self.lengths.device)

    def pack(self, values: Tensor) -> Tensor:
        """`values` `[B, T]` at the True positions, `[N]`, row by row."""
        flat = values.flatten()
        if self._spans is None:
            return flat[self._index]
        return torch.cat([flat[:0], *(flat[start:end] for start, end in self._spans)])

    def row_sums(self, packed: Tensor) -> Tensor:
        """Sum of the packed values of each row, `[B]`."""
        if not len(self.lengths):
            return packed.new_zeros(0)
        sums: Tensor = torch.segment_reduce(packed, "sum", lengths=self.lengths)
        return sums


def _runs(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Flat positions at which runs of True start, and those after which they end, `[R]` each. No run crosses a row."""
    length = mask.shape[1]
    if mask.numel() == 0:
        none = torch.zeros(0, dtype=torch.int64, device=mask.device)
        return none, none
    row, column = (mask[:, 1:] ^ mask[:, :-1]).nonzero(as_tuple=True)
    first, last = mask[:, 0].nonzero()[:, 0] * length, (mask[:, -1].nonzero()[:, 0] + 1) * length
    edges = torch.cat([row * length + column + 1, first, last]).sort().values
    return edges[0::2], edges[1::2]
