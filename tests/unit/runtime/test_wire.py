from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_trm.errors import ControllerError
from moe_trm.runtime import wire
from moe_trm.types import MicroBatch, MiniBatch, RolloutRecord, TrainBatch, TrainRow
from tests.unit.records import make_record


def test_a_train_batch_arrives_as_it_was_sent() -> None:
    rows = tuple(TrainRow(make_record(sample_id=i, num_prompt=3, num_sampled=i + 1), 0.5 * i) for i in range(3))
    batch = TrainBatch(7, (MiniBatch((MicroBatch(rows), MicroBatch(())), 3, 6),), {"reward/mean": 0.25})
    received = wire.decode([bytes(frame) for frame in wire.encode(batch)], TrainBatch)
    assert received.metrics == batch.metrics
    assert received.mini_batches[0].micro_batches[1].rows == ()
    for sent, got in zip(rows, received.mini_batches[0].micro_batches[0].rows, strict=True):
        assert got.advantage == sent.advantage
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
