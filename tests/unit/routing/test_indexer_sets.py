"""Sets of positions as bits: what comes back, how many bits, what is refused."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from math import comb, log2

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routing import RouteError, RouteRecord, decode, encode, token_digest
from routing.indexer.record import IndexerRecord
from routing.indexer.sets import bound_bits, pack, unpack
from routing.record.groups import decode_group, encode_group, extend


def random_sets(rows: int, top_k: int, seed: int = 0, near: float = 0.0) -> np.ndarray:
    """`[M, K]` of rows K, K + 1, ...; `near`: how much more often late positions are chosen than early ones."""
    rng, found = np.random.default_rng(seed), np.zeros((max(0, rows - top_k), top_k), np.int64)
    for place, row in enumerate(range(top_k, rows)):
        scores = rng.gumbel(size=row + 1) + near * np.arange(row + 1) / (row + 1)
        found[place] = np.sort(np.argsort(-scores)[:top_k])
    return found


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 90), st.integers(1, 12), st.integers(0, 999), st.sampled_from([0.0, 5.0, 50.0]))
def test_sets_come_back_and_take_no_more_than_their_bound(rows: int, top_k: int, seed: int, near: float) -> None:
    sets = random_sets(rows, top_k, seed, near)
    packed = pack(sets)
    assert (unpack(packed, len(sets), top_k) == sets).all()
    # Four bytes and two ends on a byte, for the part.
    bound = sum(bound_bits(row + 1, top_k) for row in range(top_k, rows))
    assert len(packed) * 8 <= bound + (48 if len(sets) else 0)


@pytest.mark.parametrize(("rows", "top_k", "most"), [(600, 32, 1.06), (1500, 32, 1.05), (300, 200, 1.05)])
def test_sets_without_pattern_are_near_the_limit(rows: int, top_k: int, most: float) -> None:
    limit = sum(log2(comb(row + 1, top_k)) for row in range(top_k, rows))
    assert limit < len(pack(random_sets(rows, top_k))) * 8 < most * limit


def test_tokens_that_see_no_more_than_k_positions_take_nothing() -> None:
    assert IndexerRecord.of(8, 8, {0: np.zeros((0, 8), int)}).packed == (b"",)
    assert len(pack(random_sets(9, 8))) == 4 + 1 + 1


def test_several_parts_are_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("routing.indexer.sets._POSITIONS", 64)
    sets = random_sets(70, 8)
    packed = pack(sets)
    assert (unpack(packed, len(sets), 8) == sets).all()
    with pytest.raises(RouteError, match="damaged"):
        unpack(packed[:-1], len(sets), 8)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 7), st.booleans())
def test_changed_bytes_give_another_legal_set_or_are_refused(place: int, bit: int, cut: bool) -> None:
    """Damage as such is found by the checksum of the record's bytes; no change may give a set that cannot be."""
    sets = random_sets(40, 6)
    packed = bytearray(pack(sets))
    place %= len(packed)
    packed[place] ^= 1 << bit
    found = np.zeros((0, 6), int)
    with suppress(RouteError):
        found = unpack(bytes(packed[:place] if cut else packed), len(sets), 6)
    assert (np.diff(found, axis=1) > 0).all()
    assert (found[:, -1] <= 6 + np.arange(len(found))).all()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda sets: sets[1:], "shape"),
        (lambda sets: sets[:, 1:], "shape"),
        (lambda sets: sets.astype(float), "shape"),
        (lambda sets: np.concatenate([sets[:3], sets[3:4] * 0 + [0, 1, 2, 8], sets[4:]]), "range"),
        (lambda sets: np.concatenate([sets[:3], sets[3:4] * 0 + [0, 1, 2, -1], sets[4:]]), "range"),
        (lambda sets: np.concatenate([sets[:3], sets[3:4] * 0 + [0, 1, 2, 2], sets[4:]]), "duplicate"),
    ],
)
def test_sets_that_cannot_be_are_refused(change, reason: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(RouteError) as error:
        IndexerRecord.of(20, 4, {0: random_sets(20, 4), 2: change(random_sets(20, 4))})
    assert error.value.reason == reason


def route_record(rows: int = 20, seed: int = 0) -> RouteRecord:
    rng = np.random.default_rng(seed)
    experts = np.argsort(rng.random((rows, 2, 8)), axis=-1)[..., :2].astype(np.uint8)
    sets = IndexerRecord.of(rows, 4, {layer: random_sets(rows, 4, seed + layer) for layer in (0, 2, 5)})
    return RouteRecord(experts, (1, 2), 8, token_digest(rng.integers(0, 99, rows + 1)), indexer=sets)


def same(left: RouteRecord, right: RouteRecord) -> bool:
    return left.indexer == right.indexer and (left.experts == right.experts).all() and left.covered is right.covered


def test_positions_travel_with_the_routes_of_their_tokens() -> None:
    records = [route_record(rows, seed) for rows, seed in ((20, 0), (3, 1), (33, 0))]
    for record in records:
        assert same(decode(encode(record)), record)
    assert all(map(same, decode_group(encode_group(records)), records))
    first = records[0]
    assert first.indexer is not None
    assert IndexerRecord.decode(first.indexer.encode()) == first.indexer
    assert first.select((2,)).indexer is first.indexer
    tokens = np.arange(21)
    assert replace(first, token_digest=token_digest(tokens)).bind(tokens, b"sample").indexer is first.indexer
    with pytest.raises(RouteError, match="no positions of this layer"):
        first.indexer.chosen(1)


def test_damaged_bytes_of_a_record_are_refused() -> None:
    data = encode(route_record())
    for place in range(0, len(data), 7):
        changed = bytearray(data)
        changed[place] ^= 1
        with pytest.raises(RouteError):
            decode(bytes(changed))


def test_positions_of_a_later_turn_are_not_appended() -> None:
    with pytest.raises(RouteError, match="cannot be appended") as error:
        extend(route_record(), route_record(), 20)
    assert error.value.reason == "positions"
