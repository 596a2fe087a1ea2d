"""Synthetic kept sets shaped like published ones: mean 8 ids, median 2, 99th percentile 82, 46% singletons.

Shape letters: S tokens, V vocabulary.
"""

from __future__ import annotations

from math import lgamma, log

import numpy as np

from moe_trm.sampling_mask.record import SamplingMask

SINGLETONS, LOG_MEAN, LOG_STD = 0.46, 1.678, 1.302
"""The other sets have `1 + ceil(exp(N(LOG_MEAN, LOG_STD)))` ids."""


def published_sizes(num_tokens: int, seed: int, largest: int = 4096) -> np.ndarray:
    """`[S]` int64 set sizes, at most `largest`."""
    rng = np.random.default_rng(seed)
    wider = 1 + np.ceil(np.exp(rng.normal(LOG_MEAN, LOG_STD, num_tokens))).astype(np.int64)
    return np.where(rng.random(num_tokens) < SINGLETONS, 1, np.minimum(wider, largest))


def synthetic_mask(sizes: np.ndarray, vocab_size: int, seed: int) -> tuple[SamplingMask, np.ndarray]:
    """Sets of these sizes, uniform over the vocabulary and ascending; and the `[S]` sampled ids, uniform within their
    sets.
    """
    rng = np.random.default_rng(seed)
    rows = []
    for size in sizes.tolist():
        row = np.unique(rng.integers(0, vocab_size, size))
        while len(row) < size:
            row = np.unique(np.concatenate([row, rng.integers(0, vocab_size, size - len(row))]))
        rows.append(row)
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    ids = np.concatenate(rows).astype(np.int32)
    return SamplingMask(ids, offsets), ids[offsets[:-1] + rng.integers(0, sizes)]


def entropy_bits_per_token(sizes: np.ndarray, vocab_size: int) -> float:
    """Entropy of such sets given the sampled token: the entropy of the sizes plus log2 C(V - 1, size - 1)."""
    counts = np.unique(sizes, return_counts=True)[1] / len(sizes)
    of_sizes = -float((counts * np.log2(counts)).sum())
    return of_sizes + float(np.mean([_log2_choose(vocab_size - 1, size - 1) for size in sizes.tolist()]))


def _log2_choose(n: int, k: int) -> float:
    return (lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1)) / log(2)
