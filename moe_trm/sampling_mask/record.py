"""The sampling mask of one sequence: which token ids were kept by top-k, top-p and min-p at each sampled position.

Shape letters: S sampled tokens, M kept ids in all (the sum of the S set sizes).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moe_trm.errors import RecordRejected


@dataclass(frozen=True)
class SamplingMask:
    """Kept ids as compressed sparse rows.

    Attributes:
        ids: `[M]` int32 token ids, row after row, in the engine's order (by probability).
        offsets: `[S + 1]` int64; row `s` is `ids[offsets[s]:offsets[s + 1]]`.
        logprobs: `[M]` float32 log-probs over the kept support at the sampling temperature, or None when only ids were recorded.
    """

    ids: np.ndarray
    offsets: np.ndarray
    logprobs: np.ndarray | None = None

    @property
    def num_rows(self) -> int:
        return int(self.offsets.shape[0]) - 1

    def validate(self, sampled_ids: np.ndarray, vocab_size: int, tolerance: float = 1e-3) -> None:
        """Raise `RecordRejected` unless rows fit `sampled_ids` `[S]`: in range, distinct, the sampled id inside, probabilities summing to one."""
        rows, sizes = self.num_rows, np.diff(self.offsets)
        if rows != len(sampled_ids) or self.offsets[0] != 0 or self.offsets[-1] != len(self.ids):
            raise RecordRejected(
                "mask_shape",
                "sampling mask does not match the sampled tokens",
                got=f"{rows} rows, {len(self.ids)} ids",
                expected=f"{len(sampled_ids)} rows",
            )
        if rows and sizes.min() < 1:
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
        if len(np.unique(keys)) != len(keys):
            raise RecordRejected("mask_duplicate", "a token id is kept twice at one position", expected="distinct ids")
        inside = np.zeros(rows, dtype=bool)
        inside[row_of[self.ids == np.asarray(sampled_ids)[row_of]]] = True
        if not inside.all():
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
            total = np.add.reduceat(np.exp(self.logprobs.astype(np.float64)), self.offsets[:-1])
            worst = int(np.abs(total - 1).argmax())
            if abs(total[worst] - 1) > tolerance:
                raise RecordRejected(
                    "mask_sum",
                    "kept probabilities do not sum to one",
                    where=f"position {worst}",
                    got=float(total[worst]),
                    expected=f"1 within {tolerance}",
                )
