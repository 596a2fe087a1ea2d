from __future__ import annotations

import contextlib
import subprocess
import sys

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_trm.errors import ControllerError
from moe_trm.runtime import wire
from moe_trm.types import MicroBatch, MiniBatch, RewardedSample, RolloutRecord, TrainBatch, TrainRow
from tests.unit.records import make_record


def test_a_train_batch_arrives_as_it_was_sent() -> None:
    rows = tuple(TrainRow(make_record(sample_id=i, num_prompt=3, num_sampled=i + 1)) for i in range(3))
    minis = (MiniBatch((MicroBatch(rows), MicroBatch(())), 3, 6),)
    compared = (RewardedSample(0, 5, 1, 0.5, {"right": 0.25}, None, (0, 2)),)
    batch = TrainBatch(7, minis, {"reward/mean": 0.25}, (), (compared, ()))
    received = wire.decode([bytes(frame) for frame in wire.encode(batch)], TrainBatch)
    assert received.metrics == batch.metrics
    assert received.compared == batch.compared
    assert received.mini_batches[0].micro_batches[1].rows == ()
    for sent, got in zip(rows, received.mini_batches[0].micro_batches[0].rows, strict=True):
        assert got.record.routes is not None
        assert sent.record.routes is not None
        np.testing.assert_array_equal(got.record.routes.experts, sent.record.routes.experts)
        assert got.record.routes.token_digest == sent.record.routes.token_digest
        np.testing.assert_array_equal(got.record.tokens, sent.record.tokens)
        assert got.record.rollout_logprobs.dtype == np.float32


def test_arrays_travel_as_raw_frames_not_inside_the_body() -> None:
    record = make_record(num_prompt=100, num_sampled=400)
    body, *buffers = wire.encode(record)
    assert len(body) < 1000
    assert sum(len(buffer) for buffer in buffers) > 4000


def test_small_arrays_share_a_frame_and_large_ones_have_their_own() -> None:
    """Empty ones, odd sizes before wide types, parts of an array, and sizes at the border."""
    whole = np.arange(4096, dtype=np.float64).reshape(64, 64)
    sent: list[np.ndarray] = [
        np.zeros(0, np.float32),
        np.arange(3, dtype=np.uint8),
        whole[:, 5],
        np.array(True),
        np.arange(wire.SMALL_BYTES - 1, dtype=np.uint8),
        np.arange(wire.SMALL_BYTES, dtype=np.uint8),
        whole,
        whole.T[:3, :5],
        np.zeros((2, 0, 3), np.int64),
    ]
    frames = wire.encode(sent)
    assert len(frames) == 4, "the body, the small ones, and two large ones"
    got = wire.decode(frames, list[np.ndarray])
    for one, other in zip(sent, got, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert np.array_equal(one, other)
        assert other.flags.aligned
        assert not (other.nbytes < wire.SMALL_BYTES and other.flags.writeable)
    assert len(wire.encode([np.zeros(0)])) == 2
    assert len(wire.encode([1, 2])) == 1


@pytest.mark.parametrize(
    "place",
    [
        (1, "|u1", (4,)),
        (1, "|u1", (4,), -8),
        (1, "|u1", (4,), 5),
        (1, "|u1", (-4,), 4),
        (1, "|u1", (-1,), 4),
        (1, "|u1", (4,), "0"),
        (1, "|u1", (4,), 0, 0),
        (2, "|u1", (8,), 0),
        (3, "|u1", (8,)),
        (0, "|u1", (4,)),
        (0, "|u1", (4,), 0),
        (-1, "|u1", (8,)),
    ],
)
def test_arrays_outside_of_their_frames_are_refused(place: tuple[object, ...]) -> None:
    frames = [msgspec.msgpack.encode([place]), bytes(8), bytes(8)]
    with pytest.raises(ControllerError):
        wire.decode(frames, list[np.ndarray])
    fine = [msgspec.msgpack.encode([(1, "|u1", (4,), 4), (2, "|u1", (8,))]), bytes(8), bytes(8)]
    assert [len(array) for array in wire.decode(fine, list[np.ndarray])] == [4, 8]


@pytest.mark.parametrize("value", [np.array([object()]), np.array(["a"]), {1: object()}])
def test_what_is_not_plain_data_cannot_be_sent(value: object) -> None:
    with pytest.raises(TypeError):
        wire.encode(value)


@given(st.data())
def test_mutated_messages_are_refused_or_still_typed(data: st.DataObject) -> None:
    frames = [bytearray(frame) for frame in wire.encode(make_record(num_prompt=2, num_sampled=2))]
    index = data.draw(st.integers(0, len(frames[0]) - 1))
    frames[0][index] = data.draw(st.integers(0, 255))
    dropped = data.draw(st.integers(1, len(frames)))
    with contextlib.suppress(ControllerError):
        received = wire.decode([bytes(frame) for frame in frames[:dropped]], RolloutRecord)
        assert isinstance(received.tokens, np.ndarray)


def test_an_empty_message_is_refused() -> None:
    with pytest.raises(ControllerError, match="empty message"):
        wire.decode([], TrainBatch)


RACE = """
import sys, threading
from dataclasses import make_dataclass
from moe_trm.runtime.wire import decode, encode

sys.setswitchinterval(1e-6)
for number in range(50):
    part = make_dataclass(f"Part{number}", [(f"field{index}", "int | None") for index in range(30)])
    globals()[part.__name__] = part
    kind = make_dataclass("Message", [(f"field{index}", f"list[{part.__name__}] | None") for index in range(20)])
    part.__module__ = kind.__module__ = __name__
    frames, gate = encode({f"field{index}": None for index in range(20)}), threading.Barrier(4)
    threads = [threading.Thread(target=lambda: gate.wait() >= 0 and decode(frames, kind)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


def test_threads_may_decode_a_type_for_the_first_time_at_once() -> None:
    """msgspec alone ends the process by a segmentation fault."""
    assert subprocess.run([sys.executable, "-c", RACE], check=False).returncode == 0
