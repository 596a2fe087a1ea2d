"""Columns of a micro-batch that one rank has under context or sequence parallelism, for rows of any layout.

| cut | a rank of `size` gets of every row | who cuts so |
|---|---|---|
| `contiguous` | one of `size` equal pieces | Ulysses (verl, DeepSpeed), ring attention in order, sequence parallelism |
| `zigzag` | pieces `rank` and `2 * size - 1 - rank` of `2 * size` | Megatron-Core, Transformer Engine |

Zigzag balances causal work. It cuts the columns of padded rows. In a pack it cuts every sequence, as Megatron-Core does
with `cu_seqlens_padded`.

Shape letters: B rows, R columns, C columns of this rank, N = B * R places in batch order, M = B * C of this rank.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from routing.errors import RouteError
from routing.layout.rows import Rows


class Cut(NamedTuple):
    """One cut of the columns, and the part that this rank keeps."""

    kind: Literal["contiguous", "zigzag"]
    rank: int
    size: int


@dataclass(frozen=True, eq=False)
class Columns:
    """The columns of `rows` that this rank feeds to its model, in their order. Without cuts: all of them.

    Attributes:
        rows: of the whole micro-batch.
        cuts: what was cut away, one after the other.

    Raises:
        RouteError: `shape`, a rank outside its group, or columns or sequences that do not split evenly.
    """

    rows: Rows
    cuts: tuple[Cut, ...] = ()

    def __post_init__(self) -> None:
        for cut in self.cuts:
            if cut.size < 1 or not 0 <= cut.rank < cut.size:
                raise RouteError(
                    "shape",
                    f"a rank outside its group cuts no columns ({cut.kind})",
                    got=f"rank {cut.rank} of {cut.size}",
                    expected="0 <= rank < size",
                )
        _ = self.index

    @classmethod
    def contiguous(cls, rows: Rows, rank: int, size: int) -> Columns:
        """Piece `rank` of `size` equal ones."""
        return cls(rows, (Cut("contiguous", rank, size),))

    @classmethod
    def zigzag(cls, rows: Rows, rank: int, size: int) -> Columns:
        """Pieces `rank` and `2 * size - 1 - rank` of every row, or of every packed sequence."""
        return cls(rows, (Cut("zigzag", rank, size),))

    def part(self, rank: int, size: int) -> Columns:
        """Piece `rank` of `size` of these columns: sequence parallelism inside of context parallelism."""
        return replace(self, cuts=(*self.cuts, Cut("contiguous", rank, size)))

    @cached_property
    def index(self) -> Tensor:
        """`[C]` int64: the columns of the micro-batch, in this rank's order."""
        index = torch.arange(self.rows.shape[1])
        for number, cut in enumerate(self.cuts):
            if cut.kind == "contiguous":
                index = _pieces(index, cut.size, "the columns")[cut.rank]
                continue
            if number:
                raise RouteError("shape", "columns that are cut already cannot be cut in zigzag", got=self.cuts)
            parts = []
            for start, stop in self._segments():
                pieces = _pieces(index[start:stop], 2 * cut.size, f"columns {start} to {stop - 1}")
                parts += [pieces[cut.rank], pieces[-1 - cut.rank]]
            index = torch.cat(parts)
        return index

    @property
    def shape(self) -> tuple[int, int]:
        """`(B, C)` of what this rank feeds to its model."""
        return self.rows.shape[0], len(self.index)

    @property
    def num_local(self) -> int:
        """`M`: places of this rank."""
        return self.shape[0] * self.shape[1]

    def cut(self, values: Tensor) -> Tensor:
        """`[B, R, ...]` to this rank's `[B, C, ...]`: token ids, targets, masks, position ids."""
        self.rows.check_shape(values)
        return values if not self.cuts else values.index_select(1, self.index.to(values.device))

    def cut_places(self, values: Tensor) -> Tensor:
        """`[N, ...]` in batch order to this rank's `[M, ...]`."""
        return self.cut(values.view(*self.rows.shape, *values.shape[1:])).flatten(0, 1)

    def keep_owned(self, values: Tensor) -> Tensor:
        """The same as `cut_places`, by another computation: which columns belong to this rank, one by one."""
        if not self.cuts:
            return values
        return values.view(*self.rows.shape, *values.shape[1:])[:, self.owned()].flatten(0, 1)

    def uncut(self, local: Tensor, fill: float = 0.0) -> Tensor:
        """`[B, C, ...]` to `[B, R, ...]`, `fill` where another rank holds the value. Differentiable.

        With `fill=0` the sum over the group is the whole.
        """
        if tuple(local.shape[:2]) != self.shape:
            raise RouteError("shape", "a tensor does not fit the columns", got=tuple(local.shape), expected=self.shape)
        uncut_rows = local.new_full((*self.rows.shape, *local.shape[2:]), fill)
        return uncut_rows.index_copy(1, self.index.to(local.device), local)

    def owned(self) -> Tensor:
        """`[R]` bool, true on the columns of this rank. Cuts keep their order, so these are the same as `index`."""
        column = torch.arange(self.rows.shape[1])
        owned = torch.ones_like(column, dtype=torch.bool)
        for cut in self.cuts:
            if cut.kind == "contiguous":
                ordinal = owned.cumsum(0) - 1
                owned = owned & (ordinal * cut.size // int(owned.sum()) == cut.rank)
                continue
            for start, stop in self._segments():
                piece = (column - start) * 2 * cut.size // (stop - start)
                inside = (column >= start) & (column < stop)
                owned &= ~inside | (torch.minimum(piece, 2 * cut.size - 1 - piece) == cut.rank)
        return owned

    def position_ids(self) -> Tensor:
        """`[B, C]` int64: each token's place in its own whole sequence."""
        return self.cut(self.rows.position_ids())

    def check_rows(self, rows: Rows) -> None:
        """Raise `RouteError` (`rows`) unless these are columns of `rows`."""
        if self.rows != rows:
            raise RouteError("rows", "the columns are those of other rows", got=self.rows.name, expected=rows.name)

    def digest(self) -> bytes:
        """16 bytes that stand for the cut; none without one."""
        if not self.cuts:
            return b""
        return hashlib.blake2b(self.index.numpy().astype("<i8").tobytes(), digest_size=16).digest()

    def _segments(self) -> list[tuple[int, int]]:
        """First column and the one behind the last of what zigzag cuts."""
        columns = self.rows.shape[1]
        if not self.rows.is_packed:
            return [(0, columns)]
        segments = self.rows.segments or self.rows.spans
        end = segments[-1][1]
        return [*segments, *([(end, columns)] if end < columns else [])]


def _pieces(index: Tensor, count: int, name: str) -> tuple[Tensor, ...]:
    if len(index) % count or not len(index):
        raise RouteError(
            "shape",
            f"{name} do not split into {count} equal pieces",
            got=len(index),
            expected=f"a multiple of {count}",
            fix="Pad the rows further, or every packed sequence: Rows.packed(..., cu_seqlens_padded=...).",
        )
    return index.chunk(count)
