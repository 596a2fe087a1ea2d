"""Sampled tokens without their padding.

Shape letters: B rows, T columns, N sampled tokens.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor


class Packing:
    """Places of the True positions of a bool `mask` `[B, T]`.

    Attributes:
        lengths: `[B]` int64, sampled tokens of each row.
        num_tokens: N.
    """

    def __init__(self, mask: Tensor) -> None:
        self.lengths = mask.count_nonzero(dim=1)
        self._index = mask.flatten().nonzero()[:, 0]
        self.num_tokens = len(self._index)

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
        return values.flatten()[self._index]

    def row_sums(self, packed: Tensor) -> Tensor:
        """Sum of the packed values of each row, `[B]`."""
        if not len(self.lengths):
            return packed.new_zeros(0)
        sums: Tensor = torch.segment_reduce(packed, "sum", lengths=self.lengths)
        return sums
