"""Metrics of a step's sampling masks are those of all of its records, the encoded bytes those of a share."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from moe_trm.rollout.mask_metrics import ENCODED_TOKENS, mask_metrics
from moe_trm.sampling_mask.codec import encode, encoded_bytes
from moe_trm.sampling_mask.record import SamplingMask, join
from moe_trm.sampling_mask.violation import drop
from moe_trm.types import RolloutRecord, SamplingParams
from tests.unit.records import VOCAB, make_record

PARAMS = SamplingParams(top_k=17, max_new_tokens=8)


def records(count: int, num_sampled: int) -> list[RolloutRecord]:
    """Of supports of three ids, but for every fifth record, whose first tokens have one."""
    made = [make_record(sample_id=number, num_sampled=num_sampled) for number in range(count)]
    return [single(record) if number % 5 == 0 else record for number, record in enumerate(made)]


def single(record: RolloutRecord) -> RolloutRecord:
    mask, tokens = record.sampling_mask, record.tokens[record.sampled]
    assert mask is not None
    assert mask.logprobs is not None
    rest = slice(mask.offsets[2], None)
    ids = np.concatenate([tokens[:2], mask.ids[rest]])
    offsets = np.concatenate([[0, 1, 2], mask.offsets[3:] - 4])
    logprobs = np.concatenate([np.zeros(2, np.float32), mask.logprobs[rest]])
    return replace(record, sampling_mask=SamplingMask(ids, offsets, logprobs))


def bytes_per_token(rows: list[RolloutRecord], vocab_size: int = VOCAB) -> tuple[float, float]:
    masks = [row.sampling_mask for row in rows if row.sampling_mask is not None]
    mask, tokens = join(masks), np.concatenate([row.tokens[row.sampled] for row in rows])
    both = encoded_bytes(mask, tokens, vocab_size)
    alone = SamplingMask(mask.ids, mask.offsets)
    assert both == (len(encode(alone, tokens, vocab_size)), len(encode(mask, tokens, vocab_size)))
    assert encoded_bytes(alone, tokens, vocab_size) == (both[0], both[0])
    return both[0] / len(tokens), both[1] / len(tokens)


def test_a_small_step_is_encoded_whole() -> None:
    rows = records(10, 5)
    found = mask_metrics(rows, PARAMS)
    assert found["sampling_mask/size_mean"] == pytest.approx((4 + 46 * 3) / 50)
    assert found["sampling_mask/singleton_fraction"] == pytest.approx(4 / 50)
    assert found["sampling_mask/top_k"] == 17
    both = found["sampling_mask/id_bytes_per_token"], found["sampling_mask/bytes_per_token"]
    assert both == pytest.approx(bytes_per_token(rows))


def test_every_nth_record_of_a_large_step_is_encoded() -> None:
    rows = records(90, 27)
    assert 2 * ENCODED_TOKENS < 90 * 27 < 3 * ENCODED_TOKENS
    found = mask_metrics(rows, PARAMS)
    assert found["sampling_mask/size_mean"] == pytest.approx((36 + (90 * 27 - 36) * 3) / (90 * 27))
    both = found["sampling_mask/id_bytes_per_token"], found["sampling_mask/bytes_per_token"]
    assert both == pytest.approx(bytes_per_token(rows[::3]))
    assert both == pytest.approx(bytes_per_token(rows), rel=0.1)


def test_dropped_tokens_count_as_violations_and_have_no_size() -> None:
    row = make_record(num_sampled=5)
    assert row.sampling_mask is not None
    wrong = np.array([True, False, False, False, False])
    found = mask_metrics([replace(row, sampling_mask=drop(row.sampling_mask, wrong))], PARAMS)
    assert found["sampling_mask/violations"] == 1
    assert found["sampling_mask/size_mean"] == 3


def test_records_without_masks_have_no_metrics() -> None:
    assert mask_metrics([replace(make_record(), sampling_mask=None)], PARAMS) == {}
