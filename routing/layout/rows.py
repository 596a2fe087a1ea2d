"""Places of sequences in the `[B, R]` tensor of tokens that a model is forwarded on, for every way to place them.

| constructor | where the tokens of a sequence are | who places them so |
|---|---|---|
| `Rows.right_padded` | first in their row | this project |
| `Rows.left_padded` | last in their row | generation by transformers |
| `Rows.padded` | anywhere in their row, without a gap | TRL, verl: prompts padded left, answers right |
| `Rows.packed` | one after the other in one row, cut by `cu_seqlens` | slime, verl without padding, FlashAttention |

Shape letters: B rows, R columns, S sequences, N = B * R places in batch order (place `n` is column `n % R` of row
`n // R`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from routing.errors import RouteError


@dataclass(frozen=True)
class Rows:
    """The place of each sequence.

    Attributes:
        shape: `(B, R)` of the tensor of tokens.
        spans: by sequence, the first of its N places and the one behind its last. Padded rows have one span for
            each row, empty where the row is padding alone.
        is_packed: several sequences share a row.
        segments: by packed sequence, the places set aside for it: its tokens, and the padding behind them.
    """

    shape: tuple[int, int]
    spans: tuple[tuple[int, int], ...]
    is_packed: bool = False
    segments: tuple[tuple[int, int], ...] = ()

    @classmethod
    def right_padded(cls, mask: Tensor) -> Rows:
        """Rows with padding behind their tokens; `mask` `[B, R]` is true on tokens.

        Raises:
            RouteError: `rows`, a row with padding elsewhere; `shape`, a mask that is not `[B, R]`.
        """
        return cls._by_mask(mask, "right_padded")

    @classmethod
    def left_padded(cls, mask: Tensor) -> Rows:
        """Rows with padding before their tokens; otherwise as `right_padded`."""
        return cls._by_mask(mask, "left_padded")

    @classmethod
    def padded(cls, mask: Tensor) -> Rows:
        """Rows with padding on either side of their tokens or on both; otherwise as `right_padded`."""
        return cls._by_mask(mask, "padded")

    @classmethod
    def packed(
        cls, cu_seqlens: Tensor, num_columns: int | None = None, *, cu_seqlens_padded: Tensor | None = None
    ) -> Rows:
        """One row `[1, R]` of sequences, one after the other.

        Args:
            cu_seqlens: `[S + 1]` integers that begin with 0: where each sequence begins, and where the last one ends.
            num_columns: `R`, where padding follows the last sequence.
            cu_seqlens_padded: `[S + 1]` likewise, where padding follows each sequence, as Megatron-Core and Transformer
                Engine need it under context parallelism. `cu_seqlens` then counts tokens alone. None: no padding
                between sequences.

        Raises:
            RouteError: `shape`, not one dimension of integers; `rows`, offsets that do not begin with 0, do not rise,
                leave no room for a sequence, or go beyond the row.
        """
        offsets = _offsets(cu_seqlens, "cu_seqlens")
        places = offsets if cu_seqlens_padded is None else _offsets(cu_seqlens_padded, "cu_seqlens_padded")
        columns = places[-1] if num_columns is None else num_columns
        if places[-1] > columns:
            raise _not_this_row("cu_seqlens", places, f"at most {columns}")
        segments, lengths = tuple(pairwise(places)), [stop - start for start, stop in pairwise(offsets)]
        if len(segments) != len(lengths) or any(
            length > stop - start for length, (start, stop) in zip(lengths, segments, strict=True)
        ):
            raise _not_this_row("cu_seqlens_padded", places, f"room for {len(lengths)} sequences of {lengths[:8]}")
        spans = tuple((start, start + length) for length, (start, _) in zip(lengths, segments, strict=True))
        return cls((1, columns), spans, is_packed=True, segments=segments)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence."""
        return tuple(stop - start for start, stop in self.spans)

    @property
    def name(self) -> str:
        """The layout in words, for errors."""
        return f"{'packed' if self.is_packed else 'padded'} rows {self.shape} of {len(self.spans)} sequences"

    def mask(self) -> Tensor:
        """`[B, R]` bool, true on tokens."""
        return self._mark(self.spans)

    def without_last(self) -> Tensor:
        """`[B, R]` bool, true on every token but the last of its sequence."""
        return self._mark([(start, max(start, stop - 1)) for start, stop in self.spans])

    def places(self) -> Tensor:
        """`[tokens]` int64: the place of every token, sequence by sequence."""
        return torch.cat([torch.arange(0), *(torch.arange(start, stop) for start, stop in self.spans)])

    def sequence_of(self) -> Tensor:
        """`[N]` int64: the sequence of each place, 0 on padding."""
        owner_N = torch.zeros(self.shape[0] * self.shape[1], dtype=torch.int64)
        for index, (start, stop) in enumerate(self.spans):
            owner_N[start:stop] = index
        return owner_N

    def position_ids(self) -> Tensor:
        """`[B, R]` int64: each token's place in its own sequence, 0 on padding.

        Padding in the segment of a packed sequence counts on. Padding behind the last segment counts from 0:
        it is a sequence of its own for models that read the ends of sequences from position ids.
        """
        positions_N = torch.zeros(self.shape[0] * self.shape[1], dtype=torch.int64)
        owned = self.segments or self.spans
        end = owned[-1][1] if self.is_packed else len(positions_N)
        for start, stop in (*owned, (end, len(positions_N))):
            positions_N[start:stop] = torch.arange(stop - start)
        return positions_N.view(self.shape)

    def sequences(self, values: Tensor) -> list[Tensor]:
        """The values `[B, R, ...]` of each sequence, `[tokens, ...]`. Raises `RouteError` (`shape`)."""
        self.check_shape(values)
        flat = values.flatten(0, 1)
        return [flat[start:stop] for start, stop in self.spans]

    def check_shape(self, values: Tensor) -> None:
        """Raise `RouteError` (`shape`) unless `values` is `[B, R, ...]`."""
        if tuple(values.shape[:2]) != self.shape:
            raise RouteError(
                "shape", "a tensor does not fit the rows", got=tuple(values.shape), expected=f"{self.shape} leading"
            )

    def digest(self) -> bytes:
        """16 bytes that stand for the layout."""
        places = np.asarray([self.shape, *self.spans, *self.segments], dtype="<i8")
        return hashlib.blake2b(places.tobytes(), digest_size=16).digest()

    def _mark(self, spans: Iterable[tuple[int, int]]) -> Tensor:
        mask_N = torch.zeros(self.shape[0] * self.shape[1], dtype=torch.bool)
        for start, stop in spans:
            mask_N[start:stop] = True
        return mask_N.view(self.shape)

    @classmethod
    def _by_mask(cls, mask: Tensor, kind: str) -> Rows:
        if mask.ndim != 2:
            raise RouteError(
                "shape",
                "a mask of rows has two dimensions",
                got=tuple(mask.shape),
                expected="[B, R], true on tokens",
                fix="Give the mask of tokens, not that of attention between them; packed sequences have cu_seqlens.",
            )
        real = mask.detach().cpu().numpy()
        if real.dtype != bool and not np.isin(real, (0, 1)).all():
            raise RouteError("rows", "a mask holds other values than 0 and 1", expected="true on tokens")
        real = real.astype(bool)
        rows, columns = real.shape
        counts = real.sum(1)
        if kind == "right_padded" and not (real[:, 1:] > real[:, :-1]).any():
            starts = np.arange(rows) * columns
            return cls((rows, columns), tuple(zip(starts.tolist(), (starts + counts).tolist(), strict=True)))
        first = np.where(counts > 0, real.argmax(1), columns if kind == "left_padded" else 0) if columns else counts
        index = np.arange(columns)[None]
        one_span = (index >= first[:, None]) & (index < (first + counts)[:, None])
        fits = (one_span == real).all(1)
        if kind == "right_padded":
            fits &= first == 0
        elif kind == "left_padded":
            fits &= first + counts == columns
        if not fits.all():
            row = int(np.argmin(fits))
            raise RouteError(
                "rows",
                "tokens do not stand where the layout says",
                where=f"row {row}",
                got=f"{counts[row]} tokens between columns {first[row]} and {columns - real[row, ::-1].argmax() - 1}",
                expected=_EXPECTED[kind],
                fix="Name the layout that the rows have: Rows.right_padded, left_padded, padded or packed.",
            )
        starts = np.arange(rows) * columns + first
        return cls((rows, columns), tuple(zip(starts.tolist(), (starts + counts).tolist(), strict=True)))


_EXPECTED = {
    "right_padded": "right padding: tokens first in their row, without a gap",
    "left_padded": "left padding: tokens last in their row, without a gap",
    "padded": "tokens without a gap between them",
}


def _offsets(cu_seqlens: Tensor, name: str) -> list[int]:
    if cu_seqlens.ndim != 1 or len(cu_seqlens) < 2 or cu_seqlens.is_floating_point():
        raise RouteError(
            "shape",
            f"{name} is no list of offsets",
            got=f"{cu_seqlens.dtype} {tuple(cu_seqlens.shape)}",
            expected="integers [S + 1], at least two",
        )
    offsets = [int(offset) for offset in cu_seqlens.tolist()]
    if offsets[0] != 0 or any(stop <= start for start, stop in pairwise(offsets)):
        raise _not_this_row(name, offsets, "0 first, then rising")
    return offsets


def _not_this_row(name: str, offsets: list[int], expected: str) -> RouteError:
    return RouteError(
        "rows",
        f"{name} does not describe the row",
        got=offsets if len(offsets) <= 8 else f"{offsets[:4]} ... {offsets[-2:]}",
        expected=expected,
        fix="Leave empty sequences out, and give the columns of the row where padding follows.",
    )
