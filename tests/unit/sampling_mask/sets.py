"""Random kept sets for tests."""

from __future__ import annotations

import numpy as np

from moe_trm.sampling_mask.record import SamplingMask


def random_mask(
    sizes: list[int], vocab: int, seed: int = 0, *, logprobs: bool = True
) -> tuple[SamplingMask, np.ndarray]:
    """A valid mask with rows of these sizes in random order of ids, and the `[S]` sampled ids."""
    rng = np.random.default_rng(seed)
    rows = [rng.choice(vocab, size, replace=False).astype(np.int32) for size in sizes]
    sampled = np.array([row[0] if len(row) else 0 for row in rows], np.int32)
    shuffled = [rng.permutation(row) for row in rows]
    support = [np.log(rng.dirichlet(np.full(size, 5.0))) if size > 1 else np.zeros(size) for size in sizes]
    return (
        SamplingMask(
            np.concatenate([np.zeros(0, np.int32), *shuffled]),
            np.concatenate([[0], np.cumsum(np.array(sizes, np.int64))]).astype(np.int64),
            np.concatenate([np.zeros(0), *support]).astype(np.float32) if logprobs else None,
        ),
        sampled,
    )
