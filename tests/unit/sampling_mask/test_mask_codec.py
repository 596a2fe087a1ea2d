"""Encoded masks come back exactly, near their entropy, and damage is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.masks import entropy_bits_per_token, published_sizes, synthetic_mask
from moe_trm.errors import RecordRejected
from moe_trm.sampling_mask.codec import decode, encode, encoded_lengths
from moe_trm.sampling_mask.record import SamplingMask, join, split
from tests.unit.sampling_mask.sets import random_mask


def assert_same(got: SamplingMask, expected: SamplingMask) -> None:
    assert np.array_equal(got.ids, expected.ids)
    assert got.ids.dtype == np.int32
    assert np.array_equal(got.offsets, expected.offsets)
    assert (got.logprobs is None) == (expected.logprobs is None)
    if got.logprobs is not None and expected.logprobs is not None:
        assert np.array_equal(got.logprobs.view(np.uint32), expected.logprobs.view(np.uint32))


@settings(max_examples=150)
@given(
    sizes=st.lists(st.integers(0, 9), max_size=12),
    vocab=st.sampled_from([9, 10, 17, 300, 151_936]),
    seed=st.integers(0, 999),
    logprobs=st.booleans(),
)
def test_round_trip(sizes: list[int], vocab: int, seed: int, logprobs: bool) -> None:
    mask, sampled = random_mask(sizes, vocab, seed, logprobs=logprobs)
    assert_same(decode(encode(mask, sampled, vocab), sampled), mask.ascending())


@settings(max_examples=100)
@given(
    sizes=st.lists(st.integers(0, 9), max_size=12),
    vocab=st.sampled_from([9, 10, 17, 300, 151_936]),
    seed=st.integers(0, 999),
    logprobs=st.booleans(),
)
def test_the_lengths_of_frames_are_known_without_writing_them(
    sizes: list[int], vocab: int, seed: int, logprobs: bool
) -> None:
    mask, sampled = random_mask(sizes, vocab, seed, logprobs=logprobs)
    bare = SamplingMask(mask.ids, mask.offsets)
    lengths = len(encode(bare, sampled, vocab)), len(encode(mask, sampled, vocab))
    assert encoded_lengths(mask.ascending(), vocab) == lengths


@pytest.mark.parametrize("sizes", [[700], [699, 700, 1], [255, 254, 256], [350], [690, 0]])
def test_large_sets_round_trip(sizes: list[int]) -> None:
    mask, sampled = random_mask(sizes, 700)
    assert_same(decode(encode(mask, sampled, 700), sampled), mask.ascending())


def test_a_singleton_with_another_log_prob_than_zero_is_kept() -> None:
    mask, sampled = random_mask([1, 2, 1], 20)
    assert mask.logprobs is not None
    mask.logprobs[-1] = -1e-7
    assert_same(decode(encode(mask, sampled, 20), sampled), mask.ascending())


def test_published_shape_costs_at_most_1_15_of_its_entropy() -> None:
    sizes = published_sizes(20_000, seed=1)
    assert sizes.mean() == pytest.approx(8, rel=0.1)
    assert np.median(sizes) == 2
    assert np.quantile(sizes, 0.99) == pytest.approx(82, rel=0.15)
    assert (sizes == 1).mean() == pytest.approx(0.46, abs=0.01)
    mask, sampled = synthetic_mask(sizes, 151_936, seed=1)
    bits = 8 * len(encode(mask, sampled, 151_936)) / len(sizes)
    entropy = entropy_bits_per_token(sizes, 151_936)
    assert entropy <= bits <= 1.15 * entropy


@settings(max_examples=200)
@given(place=st.integers(0, 10**6), change=st.integers(1, 255), cut=st.integers(0, 40), seed=st.integers(0, 20))
def test_damage_is_refused_or_gives_another_valid_mask(place: int, change: int, cut: int, seed: int) -> None:
    """Without a checksum some changes cannot be seen; none may crash, run away or give ids outside the vocabulary."""
    mask, sampled = random_mask([3, 1, 1, 7, 300, 2], 400, seed)
    data = bytearray(encode(mask, sampled, 400))
    data[place % len(data)] ^= change
    try:
        got = decode(bytes(data[: len(data) - cut]), sampled)
    except RecordRejected:
        return
    assert cut == 0
    SamplingMask(got.ids, got.offsets).validate(sampled, 2**32, allow_empty=True)


@pytest.mark.parametrize("change", ["short", "long", "tokens", "version"])
def test_wrong_frames_are_refused(change: str) -> None:
    mask, sampled = random_mask([3, 1, 2], 50)
    data = encode(mask, sampled, 50)
    given_tokens = sampled[:-1] if change == "tokens" else sampled
    wrong = {"short": data[:-1], "long": data + b"\0", "tokens": data, "version": b"\7" + data[1:]}[change]
    with pytest.raises(RecordRejected, match="damaged") as caught:
        decode(wrong, given_tokens)
    assert caught.value.reason == "mask_damaged"


def test_a_sampled_token_outside_is_refused() -> None:
    mask, sampled = random_mask([3, 2], 50)
    outside = next(i for i in range(50) if i not in mask.ids[:3])
    with pytest.raises(RecordRejected) as caught:
        encode(mask, np.array([outside, sampled[1]]), 50)
    assert caught.value.reason == "mask_violation"


def test_join_and_split() -> None:
    masks = [random_mask(sizes, 30, seed)[0] for seed, sizes in enumerate([[2, 1], [], [4, 0, 3]])]
    for got, expected in zip(split(join(masks), [2, 0, 3]), masks, strict=True):
        assert_same(got, expected)


def test_a_row_of_100_000_tokens() -> None:
    sizes = published_sizes(100_000, seed=2)
    mask, sampled = synthetic_mask(sizes, 151_936, seed=2)
    got = decode(encode(mask, sampled, 151_936), sampled)
    assert np.array_equal(got.ids, mask.ids)
    assert np.array_equal(got.offsets, mask.offsets)
