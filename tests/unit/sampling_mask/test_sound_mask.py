"""The quick look at a mask lets through what `SamplingMask.validate` does, in the same order, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_trm.errors import RecordRejected
from moe_trm.sampling_mask.record import SUM_TOLERANCE, SamplingMask
from moe_trm.sampling_mask.sound import sound_mask
from tests.unit.sampling_mask.sets import random_mask

VOCAB = 50


def looked_at(mask: SamplingMask, sampled: np.ndarray) -> tuple[SamplingMask, np.ndarray] | None:
    assert mask.logprobs is not None
    return sound_mask(mask.ids, np.diff(mask.offsets).tolist(), mask.logprobs, sampled, VOCAB)


def refused(mask: SamplingMask, sampled: np.ndarray) -> bool:
    try:
        mask.ascending().validate(sampled, VOCAB)
    except RecordRejected:
        return True
    return False


@settings(max_examples=60)
@given(sizes=st.lists(st.integers(1, VOCAB // 4), min_size=1, max_size=12), seed=st.integers(0, 9))
def test_a_sound_mask_is_put_in_order(sizes: list[int], seed: int) -> None:
    mask, sampled = random_mask(sizes, VOCAB, seed)
    found, expected = looked_at(mask, sampled), mask.ascending()
    assert found is not None
    assert expected.logprobs is not None
    assert found[0].logprobs is not None
    for own, other in (
        (found[0].ids, expected.ids),
        (found[0].offsets, expected.offsets),
        (found[0].logprobs, expected.logprobs),
        (found[1], expected.logprobs[expected.ids == np.repeat(sampled, sizes)]),
    ):
        assert own.dtype == other.dtype
        assert np.array_equal(own, other)


@settings(max_examples=200)
@given(
    place=st.integers(0, 11),
    value=st.integers(-3, VOCAB + 2) | st.sampled_from([2**31 - 1, -(2**31)]),
    row=st.integers(0, 3),
    token=st.integers(-3, VOCAB + 2) | st.sampled_from([2**31 - 1, -(2**31)]),
    shift=st.sampled_from([0.0, 1e-7, 2e-3, -2e-3, 5.0]),
)
def test_what_is_wrong_anywhere_is_never_sound(place: int, value: int, row: int, token: int, shift: float) -> None:
    """Ids out of range or twice, a token outside of its row, a sum that is not one."""
    mask, sampled = random_mask([2, 5, 1, 4], VOCAB)
    assert mask.logprobs is not None
    ids, logprobs = mask.ids.copy(), mask.logprobs.copy()
    ids[place], logprobs[place] = value, logprobs[place] + np.float32(shift)
    for changed, of in ((replace(mask, ids=ids, logprobs=logprobs), sampled), (mask, _put(sampled, row, token))):
        assert (looked_at(changed, of) is None) == refused(changed, of)


def _put(values: np.ndarray, place: int, value: int) -> np.ndarray:
    changed = values.copy()
    changed[place] = value
    return changed


def test_a_token_of_the_next_row_is_not_in_its_own() -> None:
    mask = SamplingMask(np.array([1, 7], np.int32), np.array([0, 1, 2]), np.zeros(2, np.float32))
    assert looked_at(mask, np.array([1, 7], np.int32)) is not None
    assert looked_at(mask, np.array([7, 7], np.int32)) is None
    assert looked_at(mask, np.array([1, 1], np.int32)) is None
    assert looked_at(mask, np.array([1, 9], np.int32)) is None, "behind the last"


@pytest.mark.parametrize("sizes", [[], [0, 2], [2, 0], [2], [1, 1, 1]])
def test_rows_that_do_not_fit_the_tokens_are_not_sound(sizes: list[int]) -> None:
    total = sum(sizes)
    ids, logprobs = np.arange(total, dtype=np.int32), np.full(total, -0.5, np.float32)
    assert sound_mask(ids, sizes, logprobs, np.zeros(2, np.int32), VOCAB) is None


@pytest.mark.parametrize("off", [SUM_TOLERANCE, -SUM_TOLERANCE])
def test_a_sum_at_its_bound_is_left_to_the_check(off: float) -> None:
    probabilities = np.array([0.5, 0.5 + off])
    mask = SamplingMask(np.array([3, 4], np.int32), np.array([0, 2]), np.log(probabilities).astype(np.float32))
    assert looked_at(mask, np.array([3], np.int32)) is None
