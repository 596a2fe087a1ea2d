"""Routes as bytes: exact round trips, sizes near the information limit, and no mutation that passes or crashes."""

from __future__ import annotations

import hashlib
import itertools
from math import comb, log2
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routing import RouteError, RouteRecord, decode, encode, expert_dtype
from routing.record import combinations
from routing.record.codec import checksum

# name -> layers, experts per token, experts, log2 C(E, K) / 8 bytes per token.
MODELS = {
    "Qwen3-30B-A3B": (48, 8, 128, 242.3),
    "DeepSeek-V3": (58, 8, 256, 351.9),
    "OLMoE": (16, 8, 64, 64.1),
    "gpt-oss": (36, 4, 128, 105.1),
    "Qwen3-Next": (48, 10, 512, 408.5),
}


def record(
    rows: int, layers: int, top_k: int, num_experts: int, seed: int = 0, digest: bytes | None = b"0123456789abcdef"
) -> RouteRecord:
    rng = np.random.default_rng(seed)
    experts = np.argsort(rng.random((rows, layers, num_experts)), axis=-1)[..., :top_k].astype(
        expert_dtype(num_experts)
    )
    return RouteRecord(experts, tuple(range(1, 2 * layers, 2)), num_experts, digest)


def assert_same(a: RouteRecord, b: RouteRecord) -> None:
    np.testing.assert_array_equal(a.experts, b.experts)
    assert a.experts.dtype == b.experts.dtype
    assert (a.layer_ids, a.num_experts, a.token_digest, a.order) == (
        b.layer_ids,
        b.num_experts,
        b.token_digest,
        b.order,
    )


def test_ranks_count_every_set_once() -> None:
    sets = np.array(sorted(itertools.combinations(range(7), 3), key=lambda s: s[::-1]))
    body = combinations.pack(sets, 7)
    assert combinations.rank_bits(7, 3) == 6
    bits = "".join(f"{byte:08b}" for byte in body)
    assert [int(bits[6 * i : 6 * i + 6], 2) for i in range(35)] == list(range(35))
    np.testing.assert_array_equal(combinations.unpack(body, 35, 7, 3), sets)


@settings(max_examples=60)
@given(st.data())
def test_round_trips(data: st.DataObject) -> None:
    num_experts = data.draw(st.sampled_from([1, 2, 8, 60, 128, 256, 257, 512, 1024]))
    top_k = data.draw(st.integers(1, min(num_experts, 16)))
    original = record(
        data.draw(st.integers(0, 9)),
        data.draw(st.integers(1, 3)),
        top_k,
        num_experts,
        data.draw(st.integers(0, 99)),
        data.draw(st.sampled_from([None, b"0" * 16])),
    )
    assert_same(decode(encode(original)), original)
    ascending = RouteRecord(
        np.sort(original.experts, axis=-1), original.layer_ids, num_experts, original.token_digest, "set"
    )
    assert_same(decode(encode(original, "set")), ascending)
    assert_same(decode(encode(ascending, "engine")), ascending)


@pytest.mark.parametrize(("top_k", "num_experts"), [(8, 128), (10, 512), (16, 1024), (16, 17), (8, 8)])
def test_first_and_last_sets(top_k: int, num_experts: int) -> None:
    ends = np.array([range(top_k), range(num_experts - top_k, num_experts)])
    body = combinations.pack(ends, num_experts)
    np.testing.assert_array_equal(combinations.unpack(body, 2, num_experts, top_k), ends)


def test_more_sets_than_one_part() -> None:
    original = record(5000, 4, 3, 16)
    np.testing.assert_array_equal(decode(encode(original, "set")).experts, np.sort(original.experts, axis=-1))


@pytest.mark.parametrize("name", MODELS)
def test_sizes(name: str) -> None:
    layers, top_k, num_experts, limit = MODELS[name]
    assert layers * log2(comb(num_experts, top_k)) / 8 == pytest.approx(limit, abs=0.05)
    per_token = combinations.packed_bytes(1000 * layers, num_experts, top_k) / 1000
    assert per_token <= 1.035 * limit
    original = record(20, layers, top_k, num_experts)
    overhead = 24 + 4 * layers + 32
    assert len(encode(original, "set")) == combinations.packed_bytes(20 * layers, num_experts, top_k) + overhead
    assert len(encode(original)) == original.experts.nbytes + overhead


def test_too_many_sets_are_refused_with_the_alternative() -> None:
    with pytest.raises(RouteError, match='order="engine"'):
        encode(record(1, 1, 40, 1024), "set")
    assert_same(decode(encode(record(1, 1, 40, 1024))), record(1, 1, 40, 1024))


def test_illegal_records_are_not_encoded() -> None:
    bad = record(3, 2, 2, 8)
    bad.experts[0, 0] = 3
    with pytest.raises(RouteError) as error:
        encode(bad)
    assert error.value.reason == "duplicate"
    with pytest.raises(RouteError):
        encode(record(3, 2, 2, 8), "sorted")  # type: ignore[arg-type]


@pytest.mark.parametrize("order", ["engine", "set"])
def test_ten_thousand_mutations_are_refused(order: Literal["engine", "set"]) -> None:
    original = encode(record(6, 3, 4, 60), order)
    rng = np.random.default_rng(0)
    for _ in range(5000):
        data = bytearray(original)
        kind = rng.integers(5)
        if kind == 0:
            data[rng.integers(len(data))] ^= 1 << rng.integers(8)
        elif kind == 1:
            del data[rng.integers(len(data)) :]
        elif kind == 2:
            data += bytes(rng.integers(0, 256, rng.integers(1, 9), dtype=np.uint8))
        elif kind == 3:
            start, stop = sorted(rng.integers(0, len(data) + 1, 2))
            data[start:stop] = bytes(rng.integers(0, 256, stop - start, dtype=np.uint8))
        else:
            del data[rng.integers(len(data))]
        if bytes(data) != original:
            with pytest.raises(RouteError):
                decode(bytes(data))


@pytest.mark.parametrize("order", ["engine", "set"])
def test_forged_checksums_never_crash(order: Literal["engine", "set"]) -> None:
    """Whoever rewrites the checksum too gets a typed error or a record that keeps every invariant."""
    original = encode(record(6, 3, 4, 60), order)
    rng = np.random.default_rng(1)
    refused = 0
    for _ in range(3000):
        data = bytearray(original[:-16])
        place = rng.integers(4, 40) if rng.random() < 0.5 else rng.integers(4, len(data))
        data[place] = rng.integers(256)
        try:
            decode(bytes(data) + hashlib.blake2b(data, digest_size=16).digest()).validate()
        except RouteError:
            refused += 1
    assert refused > 1000


def test_a_rank_beyond_the_last_set_is_refused() -> None:
    for top_k, num_experts in ((2, 8), (10, 512)):
        width = combinations.rank_bits(num_experts, top_k)
        bits = f"{comb(num_experts, top_k):0{width}b}".ljust((width + 7) // 8 * 8, "0")
        with pytest.raises(RouteError, match="no set"):
            combinations.unpack(int(bits, 2).to_bytes(len(bits) // 8, "big"), 1, num_experts, top_k)


@pytest.mark.parametrize("rows", [1, 6, 8, 11])
def test_bits_behind_the_last_row_of_the_coverage_are_refused(rows: int) -> None:
    """Also with a checksum that fits them."""
    partial = record(rows, 2, 2, 8, digest=None).uncover(slice(0, 1))
    data, start = encode(partial), 24 + 4 * 2
    np.testing.assert_array_equal(decode(data).coverage(), partial.coverage())
    for bit in range(rows, -(-rows // 8) * 8):
        changed = bytearray(data[:-16])
        changed[start + bit // 8] |= 0x80 >> bit % 8
        with pytest.raises(RouteError, match="coverage"):
            decode(bytes(changed) + checksum(bytes(changed)))
