"""Sampling masks that hold every check, put in order and looked at in one pass.

Nearly every mask does. What is wrong with any other is for `SamplingMask.validate` to say. A short answer has so few
kept ids that plain numbers are looked at sooner than an array operation begins (`sound_rows`).

Shape letters: S sampled tokens, M kept ids in all.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import exp
from typing import cast

import numpy as np

from moe_trm.sampling_mask.record import SUM_TOLERANCE, SamplingMask

_SURELY = 0.99 * SUM_TOLERANCE
"""Sums are added up in another order than in `SamplingMask.validate`: what is near its bound is left to it."""

_LOWEST = float(np.finfo(np.float32).min)
FEW_IDS = 192
"""Kept ids of an answer up to which `sound_rows` is faster than `sound_mask`."""


def sound_rows(
    ids_rows: Sequence[Sequence[int]],
    logprob_rows: Sequence[Sequence[float | None]],
    sampled_ids: Sequence[int],
    vocab_size: int,
) -> tuple[SamplingMask, np.ndarray] | None:
    """As `sound_mask`, of at most `FEW_IDS` ids in rows with as many log-probs each.

    None also where a log-prob is above 0, or is none.

    Args:
        ids_rows: kept ids of each row, in any order.
        logprob_rows: their log-probs.
        sampled_ids: one for each row.
        vocab_size: ids are below.
    """
    offsets = [0, *accumulate(map(len, ids_rows))]
    if not 0 < offsets[-1] <= FEW_IDS or len(ids_rows) != len(sampled_ids):
        return None
    ids, logprobs, sampled = list[int](), list[float](), list[float]()
    numbers = cast("Sequence[Sequence[float]]", logprob_rows)
    for row, values, token in zip(ids_rows, numbers, sampled_ids, strict=True):
        if len(row) == 1:
            [own] = values
            if row[0] != token or own is None or not -_SURELY <= own <= 0:
                return None
            ids.append(token)
            logprobs.append(own)
        else:
            kept = dict(zip(row, values, strict=True))
            if token not in kept or len(kept) != len(row) or None in values or max(values) > 0:
                return None
            if not abs(sum(map(exp, values)) - 1) <= _SURELY:
                return None
            own, order = kept[token], sorted(kept)
            ids += order
            logprobs += map(kept.__getitem__, order)
        sampled.append(own)
    if min(ids) < 0 or max(ids) >= vocab_size or min(logprobs) < _LOWEST:
        return None
    mask = SamplingMask(np.array(ids, np.int32), np.array(offsets, np.int64), np.array(logprobs, np.float32))
    return mask, np.array(sampled, np.float32)


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
    order = keys_M.argsort()
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
