"""The one map that cuts both tokens and routes for a rank, so that the two always match, of padded rows.

`routing.layout.packed` is the same for packs.

Shape letters: B sequences, R forwarded tokens of the longest, C = R / cp_size columns of this rank, N = B * C / sp_size
tokens in router order, K experts per token.

Order of the cut, for a right-padded `[B, R]` micro-batch:
1. context parallel: columns are split into `2 * cp_size` equal chunks; rank `i` owns chunks `i` and
   `2 * cp_size - 1 - i` (balanced causal work), and feeds them to the model as `[B, C]`;
2. the model works sequence-first: `[C, B]`;
3. sequence parallel: rows of `[C, B]` are split into `sp_size` equal shards;
4. the router sees the shard flattened: local token `n` is sequence `n % B`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from routing.errors import RouteError


@dataclass(frozen=True)
class Layout:
    """Cut of a right-padded `[B, R]` micro-batch on one rank.

    Attributes:
        batch: `B`, sequences.
        length: `R`, columns, padding included.
        cp_size, cp_rank: context parallel group (zigzag split of the columns).
        sp_size, sp_rank: sequence parallel group, that is the tensor parallel group when sequence parallelism is on,
            else 1 and 0.

    Raises:
        RouteError: `shape`, when sizes do not divide or a rank is outside its group.
    """

    batch: int
    length: int
    cp_size: int = 1
    cp_rank: int = 0
    sp_size: int = 1
    sp_rank: int = 0

    def __post_init__(self) -> None:
        if self.batch < 1 or self.length < 1:
            raise RouteError(
                "shape",
                "an empty micro-batch has no layout",
                got=(self.batch, self.length),
                expected="at least one row and one column",
            )
        check_ranks(self.cp_size, self.cp_rank, self.sp_size, self.sp_rank)
        if self.cp_size > 1 and self.length % (2 * self.cp_size):
            raise RouteError(
                "shape",
                "columns do not split into context parallel chunks",
                got=self.length,
                expected=f"a multiple of {2 * self.cp_size}",
                fix="Pad the micro-batch further.",
            )
        if self.columns % self.sp_size:
            raise RouteError(
                "shape",
                "columns do not split into sequence parallel shards",
                got=self.columns,
                expected=f"a multiple of {self.sp_size}",
                fix="Pad the micro-batch further.",
            )

    @property
    def columns(self) -> int:
        """`C`: columns of the micro-batch that this rank feeds to the model."""
        return self.length // self.cp_size

    @property
    def num_local(self) -> int:
        """`N`: tokens this rank's routers see."""
        return self.batch * self.columns // self.sp_size

    @property
    def num_places(self) -> int:
        """`B * R`: places of the flattened micro-batch, which `router_index` counts."""
        return self.batch * self.length

    @property
    def starts(self) -> range:
        """First place of each row."""
        return range(0, self.num_places, self.length)

    @property
    def fed(self) -> tuple[int, int]:
        """Rows and columns that the ranks feed to the model together."""
        return self.batch, self.length

    @property
    def cuts(self) -> bool:
        """True where the model is fed anything but the micro-batch itself."""
        return self.cp_size > 1

    def room(self, row: int) -> int:
        """Tokens that row `row` can hold."""
        return self.length

    def digest(self) -> bytes:
        """Nothing: places follow from the shape of the micro-batch, which has a digest of its own."""
        return b""

    def positions(self) -> Tensor:
        """`[C]` int64 columns of the micro-batch that this rank feeds to the model, in order."""
        chunks = torch.arange(self.length).view(2 * self.cp_size if self.cp_size > 1 else 1, -1)
        return torch.cat([chunks[self.cp_rank], chunks[-1 - self.cp_rank]]) if self.cp_size > 1 else chunks[0]

    def position_ids(self) -> Tensor:
        """`[B, C]` int64: the place of each column in its own row."""
        return self.positions().expand(self.batch, -1)

    def router_index(self) -> Tensor:
        """`[N]` int64: for each token in router order, its place in the flattened `[B * R]` micro-batch.

        Not to be written to: micro-batches of one shape follow each other, and share it.
        """
        return _router_index(self)

    def cut_tokens(self, values: Tensor) -> Tensor:
        """Cut `[B, R, ...]` to the `[B, C, ...]` that this rank feeds to the model.

        Values are token ids, targets, masks and position ids.
        """
        check_leading(self, values, (self.batch, self.length))
        return values if self.cp_size == 1 else values.index_select(1, self.positions().to(values.device))

    def uncut_tokens(self, local: Tensor, fill: float = 0.0) -> Tensor:
        """Inverse of `cut_tokens` for outputs: `[B, C, ...]` to `[B, R, ...]`.

        `fill` stands where another rank holds the value.

        With `fill=0` the sum over the context parallel group is the whole micro-batch. Differentiable.
        """
        check_leading(self, local, (self.batch, self.columns))
        if self.cp_size == 1:
            return local
        uncut_rows = local.new_full((self.batch, self.length, *local.shape[2:]), fill)
        return uncut_rows.index_copy(1, self.positions().to(local.device), local)

    def to_router(self, values: Tensor) -> Tensor:
        """`[B, R, ...]` to this rank's router order `[N, ...]`."""
        check_leading(self, values, (self.batch, self.length))
        return values.flatten(0, 1).index_select(0, self.router_index().to(values.device))

    def from_router(self, local: Tensor, fill: float = 0.0) -> Tensor:
        """Inverse of `to_router`: `[N, ...]` to `[B, R, ...]`, `fill` where another rank holds the value."""
        check_leading(self, local, (self.num_local,))
        flat = local.new_full((self.batch * self.length, *local.shape[1:]), fill)
        placed = flat.index_copy(0, self.router_index().to(local.device), local)
        return placed.view(self.batch, self.length, *local.shape[1:])


@lru_cache(maxsize=4)
def _router_index(layout: Layout) -> Tensor:
    # Outside of inference mode, because a later backward may have to save it.
    with torch.inference_mode(mode=False):
        shard = layout.positions().chunk(layout.sp_size)[layout.sp_rank]
        return (shard[:, None] + layout.length * torch.arange(layout.batch)[None, :]).flatten()


def check_ranks(cp_size: int, cp_rank: int, sp_size: int, sp_rank: int) -> None:
    """Raise `RouteError` (`shape`) for a rank outside of its group."""
    for name, size, rank in (("context", cp_size, cp_rank), ("sequence", sp_size, sp_rank)):
        if size < 1 or not 0 <= rank < size:
            raise RouteError(
                "shape",
                f"{name} parallel rank outside its group",
                got=f"rank {rank} of {size}",
                expected="0 <= rank < size",
            )


def check_leading(layout: object, values: Tensor, expected: tuple[int, ...]) -> None:
    """Raise `RouteError` (`shape`) unless `values` has the leading dimensions that `layout` expects."""
    if tuple(values.shape[: len(expected)]) != expected:
        raise RouteError(
            "shape",
            "tensor does not fit the layout",
            got=tuple(values.shape),
            expected=f"{expected} leading",
            where=str(layout),
        )


def padding_multiple(cp_size: int = 1, sp_size: int = 1) -> int:
    """Divisor of a micro-batch's padded length: `2 * cp_size * sp_size` with context parallelism, else `sp_size`."""
    return (2 * cp_size if cp_size > 1 else 1) * sp_size
