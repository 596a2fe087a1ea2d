"""The map between a micro-batch of padded rows and the pack of its tokens, one row, that a model is forwarded on.

Shape letters: B rows, R columns of the padded micro-batch, T places of the pack, C = T / cp_size places that this rank
feeds to the model, N = C / sp_size tokens in router order, S sequences of the pack (rows with tokens).

A pack holds the tokens of each row in turn. Behind a row's tokens stand the alignment columns that it needs:

- context parallel: each row takes a multiple of `2 * cp_size` places. It is split into `2 * cp_size` equal chunks, and
  rank `i` owns chunks `i` and `2 * cp_size - 1 - i` of every row, as Megatron-Core and Transformer Engine cut packs;
- sequence parallel: the last row takes as many places more as even shards need.

Without both there are none. They follow the tokens of their row, so under the causal mask no token sees them. Their
token id is 0, they are never scored, and never counted in what is proved or measured of routes.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from routing.errors import RouteError
from routing.layout.padded import Layout, check_leading, check_ranks
from routing.layout.rows import Rows

SHORTEST = 2
"""Places of a pack at least, as columns of a padded micro-batch."""


def packed_places(lengths: Sequence[int], cp_size: int = 1, sp_size: int = 1) -> tuple[int, ...]:
    """Places that rows with `lengths` tokens take in a pack, alignment included; 0 for a row without tokens.

    In a pack without any token the first row takes the fewest that ranks can share.
    """
    multiple = 2 * cp_size if cp_size > 1 else 1
    pack_multiple = math.lcm(multiple, cp_size * sp_size)
    places = [-(-length // multiple) * multiple for length in lengths]
    total = sum(places)
    last = max((row for row, length in enumerate(lengths) if length), default=0)
    places[last] += -(-max(total, SHORTEST) // pack_multiple) * pack_multiple - total
    return tuple(places)


@dataclass(frozen=True)
class PackedLayout:
    """Cut of one packed micro-batch on one rank. The same calls as `routing.layout.padded.Layout`.

    Attributes:
        lengths: tokens of each of the B rows, which come first in their row; 0 for a row of padding alone.
        length: `R`, columns of the padded micro-batch.
        cp_size, cp_rank, sp_size, sp_rank: as of `Layout`.

    Raises:
        RouteError: `shape`, no rows, a row longer than `length`, or a rank outside its group.
    """

    lengths: tuple[int, ...]
    length: int
    cp_size: int = 1
    cp_rank: int = 0
    sp_size: int = 1
    sp_rank: int = 0

    def __post_init__(self) -> None:
        if not self.lengths or not all(0 <= length <= self.length for length in self.lengths):
            raise RouteError(
                "shape",
                "these rows are no micro-batch",
                got=self.lengths[:8],
                expected=f"at least one row of 0..{self.length} tokens",
            )
        check_ranks(self.cp_size, self.cp_rank, self.sp_size, self.sp_rank)

    @property
    def batch(self) -> int:
        """`B`."""
        return len(self.lengths)

    @cached_property
    def places(self) -> tuple[int, ...]:
        """Places that each row takes; see `packed_places`."""
        return packed_places(self.lengths, self.cp_size, self.sp_size)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """First place of each row."""
        return (0, *accumulate(self.places[:-1]))

    @property
    def sequences(self) -> tuple[int, ...]:
        """`[S]` places of the rows that have any: the sequences that attention keeps apart."""
        return tuple(places for places in self.places if places)

    @property
    def num_places(self) -> int:
        """`T`."""
        return sum(self.places)

    @property
    def columns(self) -> int:
        """`C`."""
        return self.num_places // self.cp_size

    @property
    def num_local(self) -> int:
        """`N`."""
        return self.columns // self.sp_size

    @property
    def fed(self) -> tuple[int, int]:
        """Rows and columns that the ranks feed to the model together: `(1, T)`."""
        return 1, self.num_places

    @property
    def cuts(self) -> bool:
        """True: what the model is fed has another shape than the micro-batch."""
        return True

    def room(self, row: int) -> int:
        """Tokens that row `row` holds."""
        return self.lengths[row]

    def rows(self) -> Rows:
        """The pack as `routing.layout.rows.Rows` describe it, a row without tokens being an empty span. One rank
        only.
        """
        assert self.num_local == self.num_places, "a rank with part of the pack has no rows"
        spans = tuple((start, start + length) for start, length in zip(self.starts, self.lengths, strict=True))
        return Rows((1, self.num_places), spans, is_packed=True)

    def digest(self) -> bytes:
        """16 bytes that stand for the places of all rows."""
        return hashlib.blake2b(np.asarray(self.places, "<i8").tobytes(), digest_size=16).digest()

    def positions(self) -> Tensor:
        """`[C]` int64 places of the pack that this rank feeds to the model, in order. Not to be written to."""
        return self._positions

    @cached_property
    def _positions(self) -> Tensor:
        if self.cp_size == 1:
            return torch.arange(self.num_places)
        chunk_positions = []
        for start, places in zip(self.starts, self.places, strict=True):
            chunks = torch.arange(start, start + places).view(2 * self.cp_size, -1)
            chunk_positions += [chunks[self.cp_rank], chunks[-1 - self.cp_rank]]
        return torch.cat(chunk_positions)

    def router_index(self) -> Tensor:
        """`[N]` int64: for each token in router order, its place in the pack."""
        return self.positions().chunk(self.sp_size)[self.sp_rank]

    def position_ids(self) -> Tensor:
        """`[1, C]` int64: the place of each column in its own sequence, alignment counted on. Not to be written to."""
        return self._position_ids

    @cached_property
    def _position_ids(self) -> Tensor:
        within_T = np.arange(self.num_places) - np.repeat(self.starts, self.places)
        return torch.from_numpy(within_T)[self.positions()][None]

    def cut_tokens(self, values: Tensor) -> Tensor:
        """`[B, R, ...]` to the `[1, C, ...]` that this rank feeds to the model; zeros on alignment columns."""
        check_leading(self, values, (self.batch, self.length))
        return self._fed.taken(values)[None]

    def uncut_tokens(self, local: Tensor, fill: float = 0.0) -> Tensor:
        """Inverse of `cut_tokens` for outputs: `[1, C, ...]` to `[B, R, ...]`, differentiable.

        `fill` stands on padding and where another rank holds the value.
        """
        check_leading(self, local, (1, self.columns))
        return self._fed.put(local[0], (self.batch, self.length), fill)

    def to_router(self, values: Tensor) -> Tensor:
        """`[B, R, ...]` to this rank's router order `[N, ...]`; zeros on alignment columns."""
        check_leading(self, values, (self.batch, self.length))
        return self._routed.taken(values)

    def from_router(self, local: Tensor, fill: float = 0.0) -> Tensor:
        """Inverse of `to_router`: `[N, ...]` to `[B, R, ...]`, `fill` as in `uncut_tokens`."""
        check_leading(self, local, (self.num_local,))
        return self._routed.put(local, (self.batch, self.length), fill)

    @cached_property
    def _source(self) -> Tensor:
        """`[T]` int64: for each place its place in the flattened `[B * R]` micro-batch, -1 on alignment columns."""
        row_T = np.repeat(np.arange(self.batch), self.places)
        column_T = np.arange(self.num_places) - np.repeat(self.starts, self.places)
        is_token_T = column_T < np.asarray(self.lengths)[row_T]
        return torch.from_numpy(np.where(is_token_T, row_T * self.length + column_T, -1))

    @cached_property
    def _fed(self) -> _Source:
        return _Source.of(self._source[self.positions()])

    @cached_property
    def _routed(self) -> _Source:
        return _Source.of(self._source[self.router_index()])


@dataclass(frozen=True)
class _Source:
    """The place of each column of a cut in the flattened micro-batch: `[X]` int64, 0 on alignment columns.

    `empty` `[X]` is true there; None where there are none.
    """

    places: Tensor
    empty: Tensor | None

    @classmethod
    def of(cls, source: Tensor) -> _Source:
        """From places that are -1 on alignment columns."""
        empty = source < 0
        return cls(source.clamp(min=0), empty if bool(empty.any()) else None)

    def taken(self, values: Tensor) -> Tensor:
        """`[B, R, ...]` -> `[X, ...]`, zeros on alignment columns."""
        taken = values.flatten(0, 1).index_select(0, self.places.to(values.device))
        if self.empty is not None:
            taken[self.empty.to(values.device)] = 0
        return taken

    def put(self, local: Tensor, shape: tuple[int, int], fill: float) -> Tensor:
        """`[X, ...]` -> `[B, R, ...]` with `fill` elsewhere."""
        flat, places = local.new_full((shape[0] * shape[1], *local.shape[1:]), fill), self.places
        if self.empty is not None:
            local, places = local[~self.empty.to(local.device)], places[~self.empty]
        return flat.index_copy(0, places.to(local.device), local).view(*shape, *local.shape[1:])


AnyLayout = Layout | PackedLayout
