"""Masks that are joined are those that are split off again, also without rows and with empty ones."""

from __future__ import annotations

import numpy as np
import pytest

from moe_trm.sampling_mask.record import SamplingMask, join, row_sizes, split
from tests.unit.sampling_mask.sets import random_mask


@pytest.mark.parametrize("sizes", [[[2, 1], [3]], [[], [4, 0, 1], [], [2]], [[0], [0, 0]], [[5]], [[], []]])
def test_rows_come_back(sizes: list[list[int]]) -> None:
    masks = [random_mask(own, 50, seed)[0] for seed, own in enumerate(sizes)]
    assert row_sizes(masks).tolist() == [size for own in sizes for size in own]
    whole = join(masks)
    for own, mask in zip(split(whole, [len(own) for own in sizes]), masks, strict=True):
        assert same(own, mask)


def same(one: SamplingMask, other: SamplingMask) -> bool:
    assert one.logprobs is not None
    assert other.logprobs is not None
    both = ((one.ids, other.ids), (one.offsets, other.offsets), (one.logprobs, other.logprobs))
    return all(left.dtype == right.dtype and np.array_equal(left, right) for left, right in both)


def test_no_mask_has_no_rows() -> None:
    assert row_sizes([]).tolist() == []
    assert join([]).num_rows == 0
