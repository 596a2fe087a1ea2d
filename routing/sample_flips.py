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

    def count(self, layers: Sequence[int], flipped_LN: Tensor, lost_LN: Tensor) -> None:
        """Add what the routers of `layers` would have chosen otherwise; zeros where nothing is due."""
        both_LKN = torch.stack((flipped_LN.to(torch.int16), lost_LN.to(torch.int16)), dim=1)
        num_samples = len(self.keys)
        if self._sample_of is not None:
            places = self._sample_of.expand(both_LKN.shape)
            none = both_LKN.new_zeros(len(layers), 2, num_samples, dtype=torch.int32)
            by_sample = none.scatter_add_(2, places, both_LKN.int())
        elif self._sample_last:
            by_sample = both_LKN.view(len(layers), 2, -1, num_samples).sum(2, dtype=torch.int32)
        else:
            by_sample = both_LKN.view(len(layers), 2, num_samples, -1).sum(3, dtype=torch.int32)
        self.counts_LKB[rows_of(layers)] = by_sample


def rows_of(layers: Sequence[int]) -> slice | list[int]:
    """`layers` as an index: a slice, which needs no tensor, where they follow each other."""
    follow = list(layers) == list(range(layers[0], layers[0] + len(layers))) if layers else False
    return slice(layers[0], layers[0] + len(layers)) if follow else list(layers)


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
    """The counts of all `passes` of this rank by sample, those of padding left out."""
    found = list(passes)
    if not found:
        return SampleFlips(np.zeros(0, np.int64), *np.zeros((3, 0, num_layers), np.int64))
    given = np.array([key for one in found for key in one.keys], np.int64)
    # One transfer from the device for all passes.
    counts_LKB = torch.cat([one.counts_LKB for one in found], dim=2).cpu().numpy()
    due_BL = np.concatenate([one.due_BL for one in found])
    table = np.stack([due_BL, *counts_LKB.transpose(1, 2, 0)], axis=1)
    real = due_BL.any(1)
    keys, place = np.unique(given[real], return_inverse=True)
    summed = np.zeros((len(keys), 3, num_layers), np.int64)
    np.add.at(summed, place, table[real])
    return SampleFlips(keys, *summed.transpose(1, 0, 2))
