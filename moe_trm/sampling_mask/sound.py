"""Sampling masks that hold every check, put in order and looked at in one pass.

Nearly every mask does. What is wrong with any other is for `SamplingMask.validate` to say.

Shape letters: S sampled tokens, M kept ids in all.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from moe_trm.sampling_mask.record import SUM_TOLERANCE, SamplingMask

_SURELY = 0.99 * SUM_TOLERANCE
"""Sums are added up in another order than in `SamplingMask.validate`: what is near its bound is left to it."""


def sound_mask(
    ids_M: np.ndarray, sizes: Sequence[int], logprobs_M: np.ndarray, sampled_ids: np.ndarray, vocab_size: int
) -> tuple[SamplingMask, np.ndarray] | None:
    """The mask with ascending ids in each row, and the `[S]` float32 log-prob of each sampled id over its row.

    None where `SamplingMask.validate` might refuse it.

    Args:
        ids_M: int32 kept ids, row after row, in any order.
        sizes: of the S rows.
        logprobs_M: float32 and finite.
        sampled_ids: `[S]` int32.
        vocab_size: ids are below.
    """
    rows = len(sizes)
    if not rows or rows != len(sampled_ids) or 0 in sizes or ids_M.view(np.uint32).max() >= vocab_size:
        return None
    # Of a short list these are several times faster than numpy's own.
    offsets = np.array([0, *accumulate(sizes)], np.int64)
    first_S = np.arange(0, rows << 32, 1 << 32)
    keys_M = first_S.repeat(np.array(sizes)) + ids_M
    order = keys_M.argsort(kind="stable")  # rows stand in order, which a merge makes use of
    keys_M, ids_M, logprobs_M = keys_M[order], ids_M[order], logprobs_M[order]
    wanted_S = first_S + sampled_ids
    places_S = keys_M.searchsorted(wanted_S)
    totals_S = np.add.reduceat(np.exp(logprobs_M, dtype=np.float64), offsets[:-1])
    sound = (
        keys_M.take(places_S, mode="clip").tobytes() == wanted_S.tobytes()
        and (keys_M[1:] > keys_M[:-1]).all()
        and totals_S.max() <= 1 + _SURELY
        and totals_S.min() >= 1 - _SURELY
    )
    return (SamplingMask(ids_M, offsets, logprobs_M), logprobs_M[places_S]) if sound else None
