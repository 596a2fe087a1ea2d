"""Keys and values of the requests that are decoded, side by side, so that attention reads them without gathering.

The cache of SGLang has the tokens of all requests in any order. To gather those of a batch takes as long as the
attention itself, and only one token of each request is new. Here each request has a row of its own, which gets that
token. A request comes into its row from the cache once, and again whenever its tokens have changed in another way.
That takes as long as gathering for a few passes. So it waits until requests no longer come and go.

Shape letters: B requests, P rows in use, S places of the longest one, H heads, G key/value heads, D head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from moe_trm_sglang_cpu.decoding import FEW_PLACES

MOST_NUMBERS = 1 << 26
"""Numbers of all rows of all layers; larger batches are gathered."""
FIRST_WIDTH, FIRST_HEIGHT = 64, 8
"""Places of a row, and rows, to begin with. Both double."""
SPARE_ROWS = 4
"""Rows without a request, beyond a quarter of those with one, before the others move together."""
FEWEST_PLACES = 1 << 10
"""Places of a batch from which rows save time."""
STEADY_PASSES, MOST_LEAVING = 4, 16
"""Requests come into rows once not more than one of so many has left during so many passes."""


@dataclass(frozen=True)
class Coming:
    """Requests that come into their rows from the cache."""

    rows: Tensor
    slots: Tensor
    """`[requests, tokens]`, their places in the cache; behind their end any that exists."""


@dataclass(frozen=True)
class Step:
    """One pass."""

    rows: Tensor
    """`[B]`, row of each request."""
    in_order: bool
    """The rows are 0 to B - 1."""
    used: int
    """P."""
    longest: int
    """S."""
    newest: Tensor
    """`[B]`, place of the new token in each row."""
    unseen: Tensor
    """`[P, G, 1, S]`: 0 for the tokens of a request, minus infinity behind them."""
    coming: Coming | None


class DenseRows:
    """Rows of requests.

    Args:
        slots_of_rows: `[pool rows, longest]`, SGLang's table of places in the cache.
        layers: of the model.
        groups: G.
        dims: of a key and of a value.
        dtype: of keys, values and queries.
    """

    def __init__(
        self, slots_of_rows: Tensor, layers: int, groups: int, dims: tuple[int, int], dtype: torch.dtype
    ) -> None:
        self._table, self._dtype = slots_of_rows, dtype
        self._groups, self._dims = groups, dims
        self._most_places = MOST_NUMBERS // (layers * groups * sum(dims))
        self._width, self._height = FIRST_WIDTH, FIRST_HEIGHT
        self.forget()

    def forget(self) -> None:
        """Begin without any request, and with no memory."""
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._unseen = torch.full((self._height, self._groups, 1, self._width), float("-inf"))
        self._counts: list[int] = []
        self._in_rows = False
        self._clear()

    def _clear(self) -> None:
        self._row_of = np.full(self._table.shape[0], -1)
        self._owner = np.full(self._height, -1)
        self._lengths = np.zeros(self._height, np.int64)
        self._last_slots = np.zeros(self._height, np.int64)

    def changed(self, pool_rows_B: Tensor) -> None:
        """Told of requests whose cached tokens change otherwise than by one more."""
        rows = self._row_of[pool_rows_B.numpy()]
        self._lengths[rows[rows >= 0]] = 0
        self._counts = []

    def step(self, pool_rows_B: Tensor, lengths_B: Tensor) -> Step | None:
        """The next pass of these requests; None where gathering is better.

        Args:
            pool_rows_B: SGLang's rows.
            lengths_B: cached tokens, the new one included.
        """
        self._counts = [*self._counts[-STEADY_PASSES:], len(lengths_B)]
        steady = self._is_steady()
        found = self._step(pool_rows_B, lengths_B, steady) if steady or self._in_rows else None
        self._in_rows = found is not None
        return found

    def _step(self, pool_rows_B: Tensor, lengths_B: Tensor, steady: bool) -> Step | None:
        """Without `steady` no request comes in."""
        owners, lengths = pool_rows_B.numpy(), lengths_B.numpy()
        longest, count = int(lengths.max()), len(lengths)
        steady = steady and count * longest >= FEWEST_PLACES
        if not (steady or self._in_rows):
            return None
        padded = count * longest > 2 * int(lengths.sum()) + FEW_PLACES
        if padded or int(lengths.min()) < 2 or not self._fits(count, longest):
            return None
        table, rows = self._table.numpy(), self._row_of[owners]
        # A slot has one token at a time. With the last one, all before it are the same.
        last = table[owners, lengths - 2]
        known = (rows >= 0) & (self._lengths[rows] == lengths - 1) & (self._last_slots[rows] == last)
        if int(rows.max()) >= count + count // 4 + SPARE_ROWS:
            self._clear()
            rows, known = np.full(count, -1), np.zeros(count, bool)
        if not (steady or known.all()):
            return None
        coming = None if known.all() else self._take_in(owners, lengths, rows, known)
        self._lengths[rows], self._last_slots[rows] = lengths, table[owners, lengths - 1]
        used = int(rows.max()) + 1
        in_order = used == count and bool((rows == np.arange(count)).all())
        rows_B, newest_B = torch.from_numpy(rows), lengths_B - 1
        self._unseen.permute(0, 3, 1, 2).index_put_((rows_B, newest_B), torch.zeros(()))
        unseen = self._unseen[:used, :, :, :longest]
        return Step(rows_B, in_order, used, longest, newest_B, unseen, coming)

    def _is_steady(self) -> bool:
        first, now = self._counts[0], self._counts[-1]
        return len(self._counts) > STEADY_PASSES and (first - now) * MOST_LEAVING <= first

    def _fits(self, count: int, longest: int) -> bool:
        """True if there is room for so many requests, made if there was none."""
        width, height = self._width, self._height
        while width < longest:
            width *= 2
        while height < count:
            height *= 2
        if width * height > self._most_places:
            return False
        if (width, height) != (self._width, self._height):
            self._width, self._height = width, height
            counts = self._counts
            self.forget()
            self._counts = counts
        return True

    def _take_in(self, owners: np.ndarray, lengths: np.ndarray, rows: np.ndarray, known: np.ndarray) -> Coming:
        """The requests that are not known. Those without a row get one, in `rows`, that no other of the pass has."""
        homeless = np.flatnonzero(rows < 0)
        taken = np.zeros(self._height, bool)
        taken[rows[rows >= 0]] = True
        free = np.flatnonzero(~taken)[: len(homeless)]
        before = self._owner[free]
        self._row_of[before[before >= 0]] = -1
        self._owner[free], self._row_of[owners[homeless]] = owners[homeless], free
        rows[homeless] = free
        new = np.flatnonzero(~known)
        cached = lengths[new, None] - 1
        slots = self._table.numpy()[owners[new], : int(cached.max())]
        slots = np.where(np.arange(slots.shape[1]) < cached, slots, slots[:, :1]).astype(np.int64)
        seen = torch.from_numpy(np.arange(self._width) < cached)
        unseen = torch.where(seen, 0.0, float("-inf"))[:, None, None].expand(-1, self._groups, -1, -1)
        coming = Coming(torch.from_numpy(rows[new]), torch.from_numpy(slots))
        self._unseen.index_copy_(0, coming.rows, unseen)
        return coming

    def attend(
        self, step: Step, layer: int, new: tuple[Tensor, Tensor, Tensor], cache: tuple[Tensor, Tensor], scaling: float
    ) -> Tensor:
        """Attention of one query per request over its tokens, `[B, H * D]`.

        Args:
            step: the pass.
            layer: number of the layer.
            new: queries `[B, H, D]`, keys and values `[B, G, D]` of the new tokens.
            cache: keys and values, `[slots, G, D]`.
            scaling: of the scores.
        """
        query, key, value = new
        heads, dim = query.shape[1:]
        if layer not in self._layers:
            shapes = [(self._height, self._groups, self._width, size) for size in self._dims]
            self._layers[layer] = torch.zeros(shapes[0], dtype=self._dtype), torch.zeros(shapes[1], dtype=self._dtype)
        for row, old, newest in zip(self._layers[layer], cache, (key, value), strict=True):
            if step.coming is not None:
                size, flat = step.coming.slots.shape[1], step.coming.slots.flatten()
                found = old.index_select(0, flat).unflatten(0, (-1, size)).transpose(1, 2)
                row[:, :, :size].index_copy_(0, step.coming.rows, found)
            row.transpose(1, 2).index_put_((step.rows, step.newest), newest)
        keys, values = (row[: step.used, :, : step.longest] for row in self._layers[layer])
        if not step.in_order:
            query = query.new_zeros(step.used, heads, dim).index_copy_(0, step.rows, query)
        # The heads that share a key are its queries.
        query = query.reshape(step.used, self._groups, -1, dim)
        out = _attention(query, keys, values, step.unseen, scaling).view(step.used, -1)
        return out if step.in_order else out.index_select(0, step.rows)


def _attention(query: Tensor, keys: Tensor, values: Tensor, unseen: Tensor, scaling: float) -> Tensor:
    """`[P, G, H / G, D]`. Torch's own, whose roundings count in half precision; its parts are faster in float32."""
    if query.dtype != torch.float32:
        return scaled_dot_product_attention(query, keys, values, attn_mask=unseen[:, :1], scale=scaling)
    flat = unseen.flatten(0, 1), query.flatten(0, 1), keys.flatten(0, 1).transpose(1, 2)
    return torch.bmm(torch.baddbmm(*flat, alpha=scaling).softmax(-1), values.flatten(0, 1))
