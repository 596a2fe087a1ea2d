"""Arrays in memory that processes share: what is written is read, and given back when nobody holds it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_trm.errors import ControllerError
from moe_trm.runtime import wire
from moe_trm.runtime.shared_blocks import PAGE, Block, BlockWriter, Place, PlaceReader, SharedFile, Span, place_of
from moe_trm.types import RolloutRecord
from tests.unit.records import make_record


def shared_record(file: SharedFile, writer: BlockWriter, sample_id: int) -> RolloutRecord:
    body, *buffers = wire.encode(make_record(sample_id=sample_id))
    return wire.decode([body, *file.open(writer.write(buffers))], RolloutRecord)


@settings(max_examples=60)
@given(
    st.lists(
        st.lists(st.integers(0, 200) | st.sampled_from([PAGE - 64, PAGE - 63, PAGE, PAGE + 1, 3 * PAGE]), max_size=5),
        max_size=5,
    )
)
def test_blocks_are_read_as_they_were_written_and_their_memory_is_given_back(sizes: list[list[int]]) -> None:
    file, rng = SharedFile(), np.random.default_rng(0)
    writer = BlockWriter(file.descriptor)
    written = [[rng.bytes(size) for size in block] for block in sizes]
    opened = [file.open(writer.write([memoryview(buffer) for buffer in block])) for block in written]
    assert [[bytes(view) for view in views] for views in opened] == written
    assert all(view.readonly for views in opened for view in views)
    while opened:
        del opened[len(opened) // 2]
        assert file.used_bytes >= PAGE * sum(map(bool, opened))
    assert file.used_bytes == 0


def test_a_record_in_shared_memory_is_the_record_and_outlives_its_file() -> None:
    file = SharedFile()
    record, plain = shared_record(file, BlockWriter(file.descriptor), 3), make_record(sample_id=3)
    del file
    assert record.routes is not None
    assert plain.routes is not None
    assert wire.encode(record)[0] == wire.encode(plain)[0]
    assert record.routes.experts.tolist() == plain.routes.experts.tolist()
    assert record.routes.experts.dtype == plain.routes.experts.dtype
    with pytest.raises(ValueError, match="read-only"):
        record.tokens[0] = 1


def test_what_another_process_reads_is_a_copy_that_is_checked() -> None:
    file = SharedFile()
    writer = BlockWriter(file.descriptor)
    record, other = shared_record(file, writer, 1), shared_record(file, writer, 2)
    places = [place_of(record.tokens), place_of(other.tokens)]
    with PlaceReader() as reader:
        copies = [np.frombuffer(reader.read(place), np.int32) for place in places if place is not None]
    assert [copy.tolist() for copy in copies] == [record.tokens.tolist(), other.tokens.tolist()]
    assert reader.num_bytes == record.tokens.nbytes + other.tokens.nbytes
    kept = record.tokens.copy()
    reader, [place, _] = PlaceReader(), places
    assert place is not None
    copy = np.frombuffer(reader.read(place), np.int32)
    del record
    assert copy.tolist() == kept.tolist()
    with pytest.raises(ControllerError, match="given back"):
        reader.__exit__(None, None, None)


def test_only_whole_arrays_of_a_block_have_a_place() -> None:
    file = SharedFile()
    record = shared_record(file, BlockWriter(file.descriptor), 1)
    assert record.routes is not None
    assert place_of(record.tokens.copy()) is None
    assert place_of(record.routes.experts[:, :1]) is None
    part, whole = place_of(record.tokens[2:]), place_of(record.tokens)
    assert part is not None
    assert whole is not None
    assert (part.start, part.size) == (whole.start + 8, whole.size - 8)


def test_a_message_lends_what_lies_in_shared_memory_and_carries_the_rest() -> None:
    file = SharedFile()
    record = shared_record(file, BlockWriter(file.descriptor), 5)
    frames = wire.encode([record, make_record(sample_id=6)], place_of)
    assert len(frames) == len(wire.encode(make_record(sample_id=6)))
    with PlaceReader() as places:
        lent, carried = wire.decode(frames, list[RolloutRecord], places)
    assert lent.tokens.tolist() == record.tokens.tolist()
    assert place_of(lent.tokens) is None
    assert carried.tokens.tolist() == make_record(sample_id=6).tokens.tolist()
    with pytest.raises(ControllerError, match="malformed"):
        wire.decode(frames, list[RolloutRecord])


@pytest.mark.parametrize(
    "block",
    [
        Block(0, 8 * PAGE, ()),
        Block(PAGE, PAGE, ()),
        Block(8, PAGE, ()),
        Block(0, 0, ()),
        Block(0, PAGE, (Span(64, PAGE),)),
        Block(0, PAGE, (Span(-8, 4),)),
    ],
)
def test_a_block_that_is_not_in_the_file_is_refused(block: Block) -> None:
    file = SharedFile()
    BlockWriter(file.descriptor).write([b"some bytes"])
    with pytest.raises(ControllerError, match="not in its shared file"):
        file.open(block)


def test_memory_that_cannot_be_reached_is_named() -> None:
    with pytest.raises(ControllerError, match="cannot be read") as caught, PlaceReader() as reader:
        reader.read(Place(2**22 + 1, 0, 0, 0, 8))
    assert "rollout.intake_processes" in caught.value.fix
