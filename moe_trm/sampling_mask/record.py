"""The sampling mask of one sequence: which token ids were kept by top-k, top-p and min-p at each sampled position.

Shape letters: S sampled tokens, M kept ids in all (the sum of the S set sizes).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from moe_trm.errors import RecordRejected

SUM_TOLERANCE = 1e-3
"""Largest distance from one of the sum of a row's probabilities."""


@dataclass(frozen=True)
class SamplingMask:
    """Kept ids as compressed sparse rows.

    Attributes:
        ids: `[M]` int32 token ids, row after row; `RolloutRecord`s have them in ascending order within each row.
        offsets: `[S + 1]` int64; row `s` is `ids[offsets[s]:offsets[s + 1]]`.
        logprobs: `[M]` float32 log-probs over the kept support at the sampling temperature, or None when only ids were
            recorded.
        violations: sampled tokens that were outside their own support and whose row was mended:
            `sampling_mask.violation` other than reject.

    An empty row means that its token was dropped: it is neither scored nor trained.
    """

    ids: np.ndarray
    offsets: np.ndarray
    logprobs: np.ndarray | None = None
    violations: int = 0

    @property
    def num_rows(self) -> int:
        return int(self.offsets.shape[0]) - 1

    def ascending(self) -> SamplingMask:
        """The same sets with the ids of each row in ascending order."""
        row = np.repeat(np.arange(self.num_rows), np.diff(self.offsets))
        # Pairs as single numbers are sorted once, not by one key after the other.
        order = np.argsort((row << 32) + self.ids, kind="stable")
        logprobs = None if self.logprobs is None else self.logprobs[order]
        return replace(self, ids=self.ids[order], logprobs=logprobs)

    def validate(
        self, sampled_ids: np.ndarray, vocab_size: int, tolerance: float = SUM_TOLERANCE, *, allow_empty: bool = False
    ) -> None:
        """Raise `RecordRejected` unless the rows fit `sampled_ids` `[S]`.

        Ids must be in range and distinct, the sampled id must be inside, and probabilities must sum to one.
        `allow_empty` accepts the empty rows of dropped tokens.
        """
        rows, sizes = self.num_rows, np.diff(self.offsets)
        if rows != len(sampled_ids) or self.offsets[0] != 0 or self.offsets[-1] != len(self.ids):
            raise RecordRejected(
                "mask_shape",
                "sampling mask does not match the sampled tokens",
                got=f"{rows} rows, {len(self.ids)} ids",
                expected=f"{len(sampled_ids)} rows",
            )
        if rows and sizes.min() < (0 if allow_empty else 1):
            raise RecordRejected(
                "mask_empty",
                "a sampling mask keeps no token",
                where=f"position {int(sizes.argmin())}",
                got=0,
                expected="at least 1 kept id",
            )
        if len(self.ids) and (self.ids.min() < 0 or self.ids.max() >= vocab_size):
            raise RecordRejected(
                "mask_range",
                "kept id outside the vocabulary",
                got=f"{self.ids.min()}..{self.ids.max()}",
                expected=f"0..{vocab_size - 1}",
            )
        row_of = np.repeat(np.arange(rows), sizes)
        keys = row_of.astype(np.int64) * vocab_size + self.ids
        # Rows in ascending order need no sort to be seen to be distinct.
        if (keys[1:] <= keys[:-1]).any() and len(np.unique(keys)) != len(keys):
            raise RecordRejected("mask_duplicate", "a token id is kept twice at one position", expected="distinct ids")
        hits = self.ids == np.asarray(sampled_ids)[row_of]
        # No id is twice in its row, so there is one hit in each row that has its sampled id.
        if np.count_nonzero(hits) != np.count_nonzero(sizes):
            inside = sizes == 0
            inside[row_of[hits]] = True
            position = int(np.argmin(inside))
            raise RecordRejected(
                "mask_violation",
                "the sampled token is outside its own sampling mask",
                where=f"position {position}",
                got=int(sampled_ids[position]),
                expected="an id of the kept set",
            )
        if self.logprobs is not None and rows:
            if not np.isfinite(self.logprobs).all():
                raise RecordRejected("mask_logprob", "a kept log-prob is not finite", expected="finite log-probs")
            total = np.bincount(row_of, np.exp(self.logprobs.astype(np.float64)), minlength=rows)[sizes > 0]
            if not len(total):
                return
            worst = int(np.abs(total - 1).argmax())
            if abs(total[worst] - 1) > tolerance:
                raise RecordRejected(
                    "mask_sum",
                    "kept probabilities do not sum to one",
                    where=f"position {worst}",
                    got=float(total[worst]),
                    expected=f"1 within {tolerance}",
                )


def join(masks: Sequence[SamplingMask]) -> SamplingMask:
    """Several masks as one, row after row; log-probs are kept when all of them have them."""
    if len(masks) == 1:
        return masks[0]
    ids = np.concatenate([np.zeros(0, np.int32), *(mask.ids for mask in masks)])
    parts = [mask.logprobs for mask in masks if mask.logprobs is not None]
    logprobs = np.concatenate([np.zeros(0, np.float32), *parts]) if len(parts) == len(masks) else None
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(row_sizes(masks))])
    return SamplingMask(ids, offsets, logprobs, sum(mask.violations for mask in masks))


def row_sizes(masks: Sequence[SamplingMask]) -> np.ndarray:
    """int64 sizes of the rows of several masks, one after the other."""
    if not masks:
        return np.zeros(0, np.int64)
    # Between two masks there is a difference that is no row.
    ends = np.cumsum([len(mask.offsets) for mask in masks])
    sizes: np.ndarray = np.diff(np.concatenate([mask.offsets for mask in masks]))
    of_row = np.ones(len(sizes), bool)
    of_row[ends[:-1] - 1] = False
    sizes_of_rows: np.ndarray = sizes[of_row]
    return sizes_of_rows


def split(mask: SamplingMask, num_rows: Sequence[int]) -> list[SamplingMask]:
    """Undo `join` of masks with `num_rows` rows each; the count of violations is not divided and left out."""
    parts, start = [], 0
    for rows in num_rows:
        first, last = mask.offsets[start], mask.offsets[start + rows]
        logprobs = None if mask.logprobs is None else mask.logprobs[first:last]
        parts.append(SamplingMask(mask.ids[first:last], mask.offsets[start : start + rows + 1] - first, logprobs))
        start += rows
    return parts
