"""Repair of a sampled token outside its own recorded support: a race in the engine's sampler, or a forced token.

Shape letters: S sampled tokens, M kept ids in all.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np

from moe_trm.sampling_mask.record import SamplingMask

Violation = Literal["reject", "union", "drop"]


def outside(mask: SamplingMask, sampled_ids: np.ndarray) -> np.ndarray:
    """`[S]` bool: the sampled id is not in its row."""
    row_of = np.repeat(np.arange(mask.num_rows), np.diff(mask.offsets))
    inside = np.zeros(mask.num_rows, bool)
    inside[row_of[mask.ids == np.asarray(sampled_ids)[row_of]]] = True
    return ~inside


def drop(mask: SamplingMask, wrong_S: np.ndarray) -> SamplingMask:
    """Empty the rows `wrong_S`: those tokens are neither scored nor trained."""
    sizes = np.diff(mask.offsets)
    keep = ~np.repeat(wrong_S, sizes)
    return SamplingMask(
        mask.ids[keep],
        _offsets(np.where(wrong_S, 0, sizes)),
        None if mask.logprobs is None else mask.logprobs[keep],
        violations=mask.violations + int(wrong_S.sum()),
    )


def union(
    mask: SamplingMask, wrong_S: np.ndarray, sampled_ids: np.ndarray, full_S: np.ndarray, log_mass_S: np.ndarray
) -> SamplingMask:
    """Add the sampled id y to the rows `wrong_S` and renormalise.

    The result is log p(v) = log(mass * p_S(v)) - log(mass + p(y)), and likewise for y.

    Args:
        mask: with log-probs.
        wrong_S: rows that lack their sampled id.
        sampled_ids: `[S]`.
        full_S: `[S]` log-probs of the sampled ids over the vocabulary.
        log_mass_S: `[S]` log of the full-vocabulary probability of the kept ids; read on `wrong_S` only.
    """
    assert mask.logprobs is not None, "the engine's support log-probs were asked for"
    wrong = np.flatnonzero(wrong_S)
    ends = mask.offsets[wrong + 1]
    total = np.logaddexp(log_mass_S[wrong].astype(np.float64), full_S[wrong].astype(np.float64))
    shift = np.zeros(mask.num_rows)
    shift[wrong] = log_mass_S[wrong] - total
    sizes = np.diff(mask.offsets)
    shifted = mask.logprobs + np.repeat(shift, sizes)
    return replace(
        mask,
        ids=np.insert(mask.ids, ends, np.asarray(sampled_ids)[wrong]),
        offsets=_offsets(sizes + wrong_S),
        logprobs=np.insert(shifted, ends, full_S[wrong] - total).astype(np.float32),
        violations=mask.violations + len(wrong),
    )


def _offsets(sizes: np.ndarray) -> np.ndarray:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)])
