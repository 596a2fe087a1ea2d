"""Flips of each sample and layer: counted on the device in every replayed forward, added over passes and ranks.

Only counts leave a rank, never routes.

Shape letters: S samples, B samples of a micro-batch, N local tokens in router order, L decoder layers, K experts per
token.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from routing.row_ids import row_name

UNNAMED = 1 << 62
"""Keys from here on are made from a row's tokens, where the caller gave no sample ids."""


@dataclass(frozen=True)
class SampleFlips:
    """Counts over all replayed forwards since the last report.

    Attributes:
        keys: `[S]` int64, the row's id (`routing.row_ids`), or a number above `UNNAMED`.
        due: `[S, L]` int64, tokens that had to use a recorded set.
        flipped: `[S, L]` int64, of these, how many the live router would have given another set.
        lost: `[S, L]` int64, recorded experts that the live router would not have chosen.
    """

    keys: np.ndarray
    due: np.ndarray
    flipped: np.ndarray
    lost: np.ndarray

    def top(self, order: np.ndarray) -> SampleFlips:
        """The samples at the places `order`."""
        return SampleFlips(self.keys[order], self.due[order], self.flipped[order], self.lost[order])


class PassFlips:
    """The counts of one forward.

    Args:
        keys: of the B samples.
        due_B: `[B]` tokens of each on this rank that must use recorded sets.
        layers: the forwarded MoE layers.
        num_layers: L.
        sample_last: router order is `[columns, B]`, not `[B, columns]`.
        sample_of: `[N]` int64, the sample of each local token where samples share a row; None: they do not.
        device: of the counts.
    """

    def __init__(
        self,
        keys: Sequence[int],
        due_B: Tensor,
        layers: Sequence[int],
        num_layers: int,
        *,
        sample_last: bool,
        device: torch.device,
        sample_of: Tensor | None = None,
    ) -> None:
        self._sample_of = None if sample_of is None else sample_of.to(device)
        self.keys = list(keys)
        self.due_BL = np.zeros((len(keys), num_layers), np.int64)
        self.due_BL[:, list(layers)] = due_B.numpy()[:, None]
        self.counts_LKB = torch.zeros(num_layers, 2, len(keys), dtype=torch.int32, device=device)
        self._sample_last = sample_last

    def count(self, layer: int, marks_2N: Tensor) -> None:
        """Add what the router of `layer` would have chosen otherwise: flips and lost experts of each local token.

        int32, zeros where nothing is due.
        """
        counts_2B, num_samples = self.counts_LKB[layer], len(self.keys)
        if self._sample_of is not None:
            counts_2B.index_add_(1, self._sample_of, marks_2N)
        elif self._sample_last:
            counts_2B += marks_2N.reshape(2, -1, num_samples).sum(1, dtype=torch.int32)
        else:
            counts_2B += marks_2N.reshape(2, num_samples, -1).sum(2, dtype=torch.int32)


def keys_of(samples: Sequence[int] | None, input_ids: Tensor | Sequence[Tensor]) -> list[int]:
    """The samples' ids, or numbers made from the tokens and the place of each row of `input_ids` `[B, R]`.

    Rows may have different lengths.
    """
    if samples:
        return list(samples)
    return [
        UNNAMED + (zlib.crc32(row.int().numpy().tobytes()) << 16) + place
        for place, row in enumerate(input_ids.cpu() if isinstance(input_ids, Tensor) else input_ids)
    ]


def name_of(key: int) -> str:
    """A sample in words."""
    return row_name(key) if key < UNNAMED else f"row {key & 0xFFFF} of a micro-batch"


def total(passes: Iterable[PassFlips], num_layers: int) -> SampleFlips:
    """The counts of all `passes` of this rank, those of padding left out; of several passes they are added by sample.

    Samples of one pass stand in its order. Whoever hears of all ranks adds by sample anyway (`over_ranks`).
    """
    found = list(passes)
    if not found:
        return SampleFlips(np.zeros(0, np.int64), *np.zeros((3, 0, num_layers), np.int64))
    given = np.array([key for one in found for key in one.keys], np.int64)
    # One transfer from the device for all passes.
    counts_LKB = torch.cat([one.counts_LKB for one in found], dim=2).cpu().numpy()
    table_3BL = np.empty((3, len(given), num_layers), np.int64)
    table_3BL[0] = np.concatenate([one.due_BL for one in found])
    table_3BL[1:] = counts_LKB.transpose(1, 2, 0)
    real = table_3BL[0].any(1)
    if not real.all():
        given, table_3BL = given[real], table_3BL[:, real]
    return SampleFlips(given, *table_3BL) if len(found) == 1 else summed(given, table_3BL)


def summed(keys_M: np.ndarray, table_3ML: np.ndarray) -> SampleFlips:
    """Counts of which several may have one key, added by their keys. Due, flipped and lost of `[M, L]` each."""
    order = np.argsort(keys_M, kind="stable")
    ordered = keys_M[order]
    first = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]])[: len(ordered)])
    return SampleFlips(ordered[first], *np.add.reduceat(table_3ML[:, order], first, axis=1))
