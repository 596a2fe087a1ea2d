"""A rank's share of a step as it is sent: one array for each field of all its rows.

A row has ten arrays. Most are short, and a message takes longer for an array than for what is in it.

Shape letter: N rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, islice, pairwise
from math import prod
from operator import attrgetter
from typing import Any, Generic, Literal, TypeVar

import msgspec
import numpy as np

from moe_trm.errors import ControllerError
from moe_trm.sampling_mask.record import SamplingMask
from moe_trm.types import MicroBatch, MiniBatch, RewardedSample, RolloutRecord, SessionTurn, TrainBatch, TrainRow
from routing import RouteRecord
from routing.indexer.record import IndexerRecord

JOINED_BYTES = 1 << 20
"""A field of more bytes is sent array by array: those are long, and a copy of all of them would take their memory."""

T = TypeVar("T")


class Joined(msgspec.Struct, frozen=True):
    """Arrays one behind the other, and the length of each along its first axis."""

    values: np.ndarray
    lengths: list[int]


Arrays = Joined | list[np.ndarray]
"""An array of each row."""


class Some(msgspec.Struct, Generic[T], frozen=True):
    """Values of some rows only: `there` says which rows have one, `values` are theirs alone."""

    there: list[bool]
    values: T


class RouteTable(msgspec.Struct, frozen=True):
    """The fields of `RouteRecord`, in their order."""

    experts: Arrays
    layer_ids: list[tuple[int, ...]]
    num_experts: list[int]
    token_digest: list[bytes | None]
    order: list[Literal["engine", "set"]]
    covered: Some[Arrays]
    indexer: list[bytes | None]


class MaskTable(msgspec.Struct, frozen=True):
    """The fields of `SamplingMask`, in their order."""

    ids: Arrays
    offsets: Arrays
    logprobs: Some[Arrays]
    violations: list[int]


class RecordTable(msgspec.Struct, frozen=True):
    """The fields of `RolloutRecord`, in their order."""

    sample_id: list[int]
    group_id: list[int]
    prompt_id: list[str]
    tokens: Arrays
    sampled: Arrays
    turn_ids: Arrays
    rollout_logprobs: Arrays
    full_logprobs: Arrays
    versions: Arrays
    routes: Some[RouteTable]
    sampling_mask: Some[MaskTable]
    finish_reason: list[str]
    reward: list[float | None]
    reward_parts: list[Mapping[str, float]]
    row: list[int]
    further: list[tuple[()]]
    session: list[tuple[SessionTurn, ...]]
    baseline: list[float | None]
    teacher_logprobs: Some[Arrays]
    server: list[int | None]
    expected: list[str]
    pictures: list[tuple[bytes, ...]]


class RowTable(msgspec.Struct, frozen=True):
    """The fields of `TrainRow`, in their order."""

    record: RecordTable
    sample_tokens: list[int | None]
    weight: list[float]


class MiniTable(msgspec.Struct, frozen=True):
    """A `MiniBatch`: the number of rows of each micro-batch."""

    micro_batches: list[int]
    num_sequences: int
    num_tokens: int


class BatchTable(msgspec.Struct, frozen=True):
    """A `TrainBatch`: `rows` has the rows of all its micro-batches, one behind the other."""

    step: int
    mini_batches: list[MiniTable]
    metrics: Mapping[str, float]
    versions: tuple[int, ...]
    compared: tuple[tuple[RewardedSample, ...], ...]
    rows: RowTable
    bank: RecordTable


def table_of(batch: TrainBatch) -> BatchTable:
    """The table of `batch`, whose records have no `further` rows: each is a row by itself."""
    rows = [row for mini in batch.mini_batches for micro in mini.micro_batches for row in micro.rows]
    minis = [
        MiniTable([len(micro.rows) for micro in mini.micro_batches], mini.num_sequences, mini.num_tokens)
        for mini in batch.mini_batches
    ]
    table = _table(
        RowTable,
        rows,
        record=_record_table(_field("record", rows)),
    )
    return BatchTable(
        batch.step, minis, batch.metrics, batch.versions, batch.compared, table, _record_table(batch.bank)
    )


def batch_of(table: BatchTable) -> TrainBatch:
    """The batch that `table` was made of; its arrays are views into the table's.

    Raises `ControllerError` for columns that do not fit each other.
    """
    try:
        rows, bank = _rows(table.rows), _rows(table.bank)
        if sum(sum(mini.micro_batches) for mini in table.mini_batches) != len(rows):
            raise ValueError(f"micro-batches do not have {len(rows)} rows")
        remaining = iter(rows)
        minis = tuple(
            MiniBatch(
                tuple(MicroBatch(tuple(islice(remaining, count))) for count in mini.micro_batches),
                mini.num_sequences,
                mini.num_tokens,
            )
            for mini in table.mini_batches
        )
    except (ValueError, TypeError) as error:
        raise ControllerError("malformed message", got=str(error), expected="columns of equal length") from error
    return TrainBatch(table.step, minis, table.metrics, table.versions, table.compared, tuple(bank))


def _record_table(records: Sequence[RolloutRecord]) -> RecordTable:
    assert not any(record.further for record in records), "each row of a sample is sent by itself"
    arrays = ("tokens", "sampled", "turn_ids", "rollout_logprobs", "full_logprobs", "versions")
    return _table(
        RecordTable,
        records,
        **{name: _arrays(_field(name, records)) for name in arrays},
        routes=_some(_field("routes", records), _route_table),
        sampling_mask=_some(_field("sampling_mask", records), _mask_table),
        teacher_logprobs=_some(_field("teacher_logprobs", records), _arrays),
    )


def _route_table(routes: Sequence[RouteRecord]) -> RouteTable:
    return _table(
        RouteTable,
        routes,
        experts=_arrays(_field("experts", routes)),
        covered=_some(_field("covered", routes), _arrays),
        indexer=[None if choice is None else choice.encode() for choice in _field("indexer", routes)],
    )


def _route(*values: Any) -> RouteRecord:
    indexer: bytes | None = values[-1]
    record = RouteRecord(*values[:-1])
    return record if indexer is None else replace(record, indexer=IndexerRecord.decode(indexer))


def _mask_table(masks: Sequence[SamplingMask]) -> MaskTable:
    return _table(
        MaskTable,
        masks,
        ids=_arrays(_field("ids", masks)),
        offsets=_arrays(_field("offsets", masks)),
        logprobs=_some(_field("logprobs", masks), _arrays),
    )


def _table(kind: type[T], items: Sequence[object], **columns: object) -> T:
    """A table with these columns; all other fields stay as they are."""
    names: tuple[str, ...] = kind.__struct_fields__  # type: ignore[attr-defined]
    return kind(**columns, **{name: _field(name, items) for name in names if name not in columns})


def _field(name: str, items: Iterable[object]) -> list[Any]:
    return list(map(attrgetter(name), items))


def _some(values: Sequence[T | None], column: Callable[[list[T]], Any]) -> Some[Any]:
    return Some([value is not None for value in values], column([value for value in values if value is not None]))


def _arrays(arrays: list[np.ndarray]) -> Arrays:
    if not arrays:
        return arrays
    first, lengths = arrays[0], list(map(len, arrays))
    if sum(lengths) * prod(first.shape[1:]) * first.itemsize > JOINED_BYTES:
        return arrays
    try:
        return Joined(np.concatenate(arrays, dtype=first.dtype, casting="no"), lengths)
    except (TypeError, ValueError):  # of several types or shapes
        return arrays


_MADE_OF: Mapping[type, Callable[..., object]] = {
    RouteTable: _route,
    MaskTable: SamplingMask,
    RecordTable: RolloutRecord,
    RowTable: TrainRow,
}


def _rows(column: Any) -> Sequence[Any]:
    """The value of each row. Raises `ValueError` for columns that do not fit each other."""
    if isinstance(column, Joined):
        return _parts(column)
    if isinstance(column, Some):
        return _spread(column)
    if (kind := _MADE_OF.get(type(column))) is None:
        values: list[Any] = column
        return values
    columns = [_rows(getattr(column, name)) for name in column.__struct_fields__]
    return [kind(*values) for values in zip(*columns, strict=True)]


def _parts(joined: Joined) -> list[np.ndarray]:
    values, ends = joined.values, [0, *accumulate(joined.lengths)]
    if ends[-1] != len(values) or min(joined.lengths, default=0) < 0:
        raise ValueError(f"arrays of {joined.lengths} in one of {len(values)}")
    return [values[start:end] for start, end in pairwise(ends)]


def _spread(some: Some[Any]) -> list[Any]:
    values = _rows(some.values)
    if sum(some.there) != len(values):
        raise ValueError(f"{len(values)} values for {sum(some.there)} rows")
    remaining = iter(values)
    return [next(remaining) if is_present else None for is_present in some.there]
