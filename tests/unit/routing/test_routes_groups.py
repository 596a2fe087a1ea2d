"""Shared rows stored once: exact round trips, sizes, and no mutation that passes."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest

from routing import RouteError, RouteRecord, encode, expert_dtype
from routing.record.codec import CHECKSUM_BYTES, checksum
from routing.record.groups import decode_group, encode_group, extend, shared_rows
from routing.replay.load import expert_load, load_entropy, load_imbalance

L, K, E = 3, 4, 60


def record(rows: int, seed: int = 0, layers: int = L) -> RouteRecord:
    draw = np.random.default_rng(seed).random((rows, layers, E))
    experts = np.argsort(draw, axis=-1)[..., :K].astype(expert_dtype(E))
    return RouteRecord(experts, tuple(range(layers)), E, bytes([seed]) * 16)


def branch(base: RouteRecord, shared: int, rows: int, seed: int) -> RouteRecord:
    own = record(rows, seed)
    return replace(own, experts=np.concatenate([base.experts[:shared], own.experts]))


def same(a: RouteRecord, b: RouteRecord) -> bool:
    return (
        np.array_equal(a.experts, b.experts)
        and a.experts.dtype == b.experts.dtype
        and (a.layer_ids, a.num_experts, a.token_digest, a.order)
        == (b.layer_ids, b.num_experts, b.token_digest, b.order)
        and np.array_equal(a.coverage(), b.coverage())
        and (a.covered is None) == (b.covered is None)
    )


def ascending(a: RouteRecord) -> RouteRecord:
    return replace(a, experts=np.sort(a.experts, axis=-1), order="set")


def group() -> list[RouteRecord]:
    first = record(40)
    members = [first, *(branch(first, 30, 5 + seed, seed) for seed in range(1, 6))]
    members.append(branch(members[3], 36, 4, 9))  # branches off a later member
    members.append(record(12, 10))  # shares nothing
    members.append(replace(first, token_digest=None))  # shares every row
    members.append(branch(first, 30, 8, 11).uncover(slice(33, 35)))
    members.append(record(6, 12, layers=2))  # another model
    return members


@pytest.mark.parametrize("order", ["engine", "set"])
def test_groups_come_back_exactly(order: Literal["engine", "set"]) -> None:
    members = group()
    found = decode_group(encode_group(members, order))
    requested = members if order == "engine" else [ascending(member) for member in members]
    assert len(found) == len(requested)
    assert all(same(a, b) for a, b in zip(found, requested, strict=True))


def test_the_prompt_is_stored_once() -> None:
    prompt = record(400)
    samples = [branch(prompt, 400, 20, seed) for seed in range(1, 9)]
    together, alone = len(encode_group(samples)), sum(len(encode(sample)) for sample in samples)
    assert together < 400 * L * K + 8 * (20 * L * K + 100)
    assert alone > 4 * together


def test_shared_rows_are_counted_in_order_and_coverage() -> None:
    first = record(10)
    assert shared_rows(first, branch(first, 7, 2, 1)) == 7
    assert shared_rows(first, first) == 10
    flipped = replace(first, experts=first.experts[..., ::-1])
    assert shared_rows(first, flipped) == 0
    assert shared_rows(first, first.uncover(slice(4, 5))) == 4
    assert shared_rows(first, record(10, 0, layers=2)) == 0


def test_a_later_answer_extends_an_earlier_record() -> None:
    first = record(30)
    whole = branch(first, 28, 9, 1)
    later = replace(whole, experts=whole.experts[25:])
    assert same(extend(first, later, 25), whole)
    with pytest.raises(RouteError) as error:
        extend(first, later, 31)
    assert error.value.reason == "rows"
    with pytest.raises(RouteError) as error:
        extend(first, record(4, layers=2), 20)
    assert error.value.reason == "layers"


def test_mutations_are_refused() -> None:
    first = record(12)
    second = branch(first, 12, 3, 1)
    data = encode_group([first, second])
    rng = np.random.default_rng(0)
    for _ in range(2000):
        changed = bytearray(data)
        kind = rng.integers(3)
        if kind == 0:
            changed[rng.integers(len(changed))] ^= 1 << rng.integers(8)
        elif kind == 1:
            del changed[rng.integers(len(changed)) :]
        else:
            changed += bytes(rng.integers(0, 256, 3, dtype=np.uint8))
        with pytest.raises(RouteError):
            decode_group(bytes(changed))


def test_a_group_of_other_sizes_than_those_known_is_refused() -> None:
    first = record(12)
    members = [first, branch(first, 12, 3, 1)]
    data = encode_group(members)
    assert all(map(same, decode_group(data, [12, 15]), members))
    with pytest.raises(RouteError, match="another number of records"):
        decode_group(data, [12])
    with pytest.raises(RouteError):
        decode_group(data, [12, 14])


def test_a_table_that_leads_outside_the_group_is_named_even_with_its_checksum() -> None:
    first = record(12)
    content = encode_group([first, branch(first, 12, 3, 1)])[:-CHECKSUM_BYTES]
    bases = 7 + 14  # behind the head and the first member
    itself = content[:bases] + struct.pack("<H", 1) + content[bases + 2 :]
    for data, reason in ((itself, "member 1 lies outside the group"), (content[:bases], "table of members is cut")):
        with pytest.raises(RouteError, match=reason):
            decode_group(data + checksum(data))


def test_bytes_of_something_else_are_named_even_with_their_checksum() -> None:
    other = b"none" + encode_group([record(12)])[4:-CHECKSUM_BYTES]
    for data in (b"", b"MTRG", other + checksum(other)):
        with pytest.raises(RouteError, match="damaged: not b"):
            decode_group(data)


def test_partial_records_round_trip_and_are_marked() -> None:
    from routing import decode

    partial = record(11).uncover(np.arange(11) < 4)
    assert same(decode(encode(partial)), partial)
    assert partial.experts[:4].tolist() == [[[0, 1, 2, 3]] * L] * 4
    with pytest.raises(RouteError):
        replace(partial, experts=record(11).experts).validate()
    with pytest.raises(RouteError):
        replace(partial, covered=partial.coverage()[:5]).validate()
    assert record(5).uncover(slice(0, 0)).covered is None


def test_load_counts_known_rows_and_its_entropy() -> None:
    even = np.stack([np.arange(8).reshape(4, 2)] * 2, axis=1).astype(np.uint8)
    even_record = RouteRecord(even, (0, 1), 8)
    load = expert_load([even_record, even_record])
    assert load.tolist() == [[2] * 8] * 2
    assert load_entropy(load) == pytest.approx([1.0, 1.0])
    assert load_imbalance(load) == pytest.approx([1.0, 1.0])
    assert expert_load([even_record.uncover(slice(0, 1))]).tolist() == [[0, 0, *[1] * 6]] * 2
    one = np.zeros((1, 4), dtype=np.int64)
    one[0, 2] = 7
    assert load_entropy(one) == pytest.approx([0.0])
    assert load_imbalance(one) == pytest.approx([4.0])
    half = np.array([[1, 1, 0, 0]])
    assert load_entropy(half) == pytest.approx([0.5])
    with pytest.raises(RouteError):
        expert_load([])
