"""A rank's share of a step as columns, there and back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_trm.errors import ControllerError
from moe_trm.rollout import batch_table
from moe_trm.rollout.batch_table import (
    BatchTable,
    Joined,
    MaskTable,
    MiniTable,
    RecordTable,
    RouteTable,
    RowTable,
    batch_of,
    table_of,
)
from moe_trm.runtime import wire
from moe_trm.sampling_mask.record import SamplingMask
from moe_trm.types import MicroBatch, MiniBatch, RewardedSample, RolloutRecord, SessionTurn, TrainBatch, TrainRow
from routing import RouteRecord
from tests.unit.records import make_record


def record(number: int, **changes: Any) -> RolloutRecord:
    return replace(make_record(sample_id=number, group_id=number // 2, num_sampled=number + 2), **changes).bound()


def rows() -> tuple[TrainRow, ...]:
    """A plain row, one with all that a row can have, and rows without routes, mask, and log-probs of the mask."""
    full, bare = record(1), record(4)
    assert full.routes is not None
    assert bare.sampling_mask is not None
    session = (SessionTurn(-1, 4, 2), SessionTurn(0, 1, 3, row=1, cut=True, reason="not_chosen"))
    full = replace(
        full,
        routes=full.routes.uncover(slice(0, 2)),
        reward=None,
        reward_parts={"right": 0.5, "short": -1.0},
        row=3,
        session=session,
        baseline=0.25,
        expected="42",
        pictures=(b"one", b""),
        teacher_logprobs=np.array([-0.5, -1.5, -2.5], np.float32),
    )
    masked = replace(bare, sampling_mask=replace(bare.sampling_mask, logprobs=None, violations=2))
    return (
        TrainRow(record(0)),
        TrainRow(full, sample_tokens=17, weight=0.75),
        TrainRow(replace(record(2), routes=None)),
        TrainRow(replace(record(3), sampling_mask=None)),
        TrainRow(masked),
    )


def batch() -> TrainBatch:
    first, *others = rows()
    micro = MicroBatch(()), MicroBatch((first,)), MicroBatch(tuple(others))
    minis = MiniBatch(micro[1:], 3, 60), MiniBatch((micro[0],), 0, 0), MiniBatch((micro[1],), 1, 2)
    return TrainBatch(7, minis, {"reward/mean": 0.25}, (5, 6), ((RewardedSample(4, 1, 2, 0.5),), ()), (record(5),))


def same(one: Any, other: Any) -> bool:
    """Equal in every field and every bit, with the same types."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if is_dataclass(one):
        return all(same(getattr(one, each.name), getattr(other, each.name)) for each in fields(one))
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def sent(table: BatchTable) -> BatchTable:
    return wire.decode([bytes(frame) for frame in wire.encode(table)], BatchTable)


def test_a_batch_arrives_as_it_was_sent() -> None:
    arrived = batch_of(sent(table_of(batch())))
    assert same(arrived, batch())
    assert not arrived.mini_batches[0].micro_batches[0].rows[0].record.tokens.flags.writeable


@pytest.mark.parametrize("minis", [(), (MiniBatch((MicroBatch(()), MicroBatch(())), 4, 9),)])
def test_a_batch_without_rows_arrives(minis: tuple[MiniBatch, ...]) -> None:
    empty = TrainBatch(1, minis, {})
    assert same(batch_of(sent(table_of(empty))), empty)


@pytest.mark.parametrize(
    ("table", "kind"),
    [(RowTable, TrainRow), (RecordTable, RolloutRecord), (RouteTable, RouteRecord), (MaskTable, SamplingMask)],
)
def test_tables_have_every_field_in_its_place(table: type[msgspec.Struct], kind: type) -> None:
    assert table.__struct_fields__ == tuple(each.name for each in fields(kind))


def test_short_arrays_are_joined_and_long_ones_sent_from_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = [row.record.tokens for mini in batch().mini_batches for micro in mini.micro_batches for row in micro.rows]
    size = sum(array.nbytes for array in tokens)
    monkeypatch.setattr(batch_table, "JOINED_BYTES", size)
    assert isinstance(table_of(batch()).rows.record.tokens, Joined)
    monkeypatch.setattr(batch_table, "JOINED_BYTES", size - 1)
    table = table_of(batch())
    assert isinstance(table.rows.record.tokens, list)
    assert same(batch_of(sent(table)), batch())
    monkeypatch.setattr(wire, "SMALL_BYTES", 1)
    own = batch()
    kept = own.mini_batches[0].micro_batches[0].rows[0].record.tokens
    assert any(np.shares_memory(np.frombuffer(frame, np.uint8), kept) for frame in wire.encode(table_of(own))[2:])


@pytest.mark.parametrize("other", [np.arange(6, dtype=np.int64), np.arange(6, dtype=np.int32).reshape(3, 2)])
def test_arrays_of_several_types_or_shapes_are_not_joined(other: np.ndarray) -> None:
    """No value becomes another on its way."""
    first, second, *_ = rows()
    odd = replace(second, record=replace(second.record, versions=other))
    mixed = TrainBatch(1, (MiniBatch((MicroBatch((first, odd)),), 2, 5),), {})
    assert isinstance(table_of(mixed).rows.record.versions, list)
    assert same(batch_of(sent(table_of(mixed))), mixed)


def test_rows_of_one_sample_are_sent_one_by_one() -> None:
    several = replace(record(0), further=(record(1),))
    with pytest.raises(AssertionError, match="by itself"):
        table_of(TrainBatch(1, (MiniBatch((MicroBatch((TrainRow(several),)),), 1, 2),), {}))


def lengths(change: Callable[[list[int]], list[int]]) -> Callable[[BatchTable], None]:
    def apply(table: BatchTable) -> None:
        tokens = table.rows.record.tokens
        assert isinstance(tokens, Joined)
        tokens.lengths[:] = change(tokens.lengths)

    return apply


@pytest.mark.parametrize(
    "damage",
    [
        lambda table: table.rows.weight.pop(),
        lambda table: table.rows.record.prompt_id.append("one more"),
        lambda table: table.rows.record.routes.values.order.pop(),
        lambda table: table.rows.record.routes.there.__setitem__(0, False),
        lambda table: table.rows.record.sampling_mask.there.pop(),
        lambda table: table.mini_batches.pop(),
        lambda table: table.mini_batches.append(MiniTable([1], 1, 1)),
        lambda table: table.mini_batches.append(MiniTable([1, -1], 1, 1)),
        lengths(lambda own: [own[0] + 1, *own[1:]]),
        lengths(lambda own: [own[0] - 1, *own[1:]]),
        lengths(lambda own: [-own[1], own[0] + 2 * own[1], *own[2:]]),
        lengths(lambda own: own[1:]),
    ],
)
def test_columns_that_do_not_fit_each_other_are_refused(damage: Callable[[BatchTable], None]) -> None:
    table = sent(table_of(batch()))
    batch_of(table)
    damage(table)
    with pytest.raises(ControllerError, match="malformed message"):
        batch_of(table)


@given(st.data())
def test_mutated_messages_are_refused_or_still_typed(data: st.DataObject) -> None:
    frames = [bytearray(frame) for frame in wire.encode(table_of(batch()))]
    index = data.draw(st.integers(0, len(frames[0]) - 1))
    frames[0][index] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ControllerError):
        received = batch_of(wire.decode([bytes(frame) for frame in frames], BatchTable))
        for mini in received.mini_batches:
            for micro in mini.micro_batches:
                assert all(isinstance(row.record.tokens, np.ndarray) for row in micro.rows)
