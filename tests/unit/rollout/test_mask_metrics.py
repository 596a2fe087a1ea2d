"""Metrics of a step's sampling masks, against what the codec writes and what records hold."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from moe_trm.rollout import mask_metrics as measured
from moe_trm.rollout.mask_metrics import mask_metrics
from moe_trm.sampling_mask.codec import encode
from moe_trm.sampling_mask.record import SamplingMask, join
from moe_trm.types import RolloutRecord, SamplingParams
from tests.unit.records import make_record

PARAMS = SamplingParams(top_k=32)


def records() -> list[RolloutRecord]:
    """Of several lengths; the last has a token that was dropped, in its middle."""
    found = [make_record(sample_id=number, num_sampled=3 + number) for number in range(5)]
    mask = found[-1].sampling_mask
    assert mask is not None
    assert mask.logprobs is not None
    kept = np.ones(len(mask.ids), bool)
    kept[3:6] = False
    sizes = np.diff(mask.offsets)
    sizes[1] = 0
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    dropped = SamplingMask(mask.ids[kept], offsets, mask.logprobs[kept], violations=1)
    return [*found[:-1], replace(found[-1], sampling_mask=dropped)]


def written(some: list[RolloutRecord], among: list[RolloutRecord]) -> tuple[float, float]:
    """Bytes of a token of `some`, without log-probs and with them, as the codec writes them beside ids of `among`."""
    mask = join([record.sampling_mask for record in some if record.sampling_mask is not None])
    sampled = np.concatenate([record.tokens[record.sampled] for record in some])
    masks = join([record.sampling_mask for record in among if record.sampling_mask is not None])
    vocab_size = 1 + int(masks.ids.max())
    bare = encode(SamplingMask(mask.ids, mask.offsets), sampled, vocab_size)
    return len(bare) / mask.num_rows, len(encode(mask, sampled, vocab_size)) / mask.num_rows


def bytes_of(metrics: dict[str, float]) -> tuple[float, float]:
    return metrics["sampling_mask/id_bytes_per_token"], metrics["sampling_mask/bytes_per_token"]


def test_bytes_of_a_token_are_those_that_the_codec_writes() -> None:
    some = [*records(), replace(make_record(sample_id=9), sampling_mask=None)]
    metrics = mask_metrics(some, PARAMS)
    assert bytes_of(metrics) == written(some[:-1], some[:-1])
    assert metrics["sampling_mask/violations"] == 1


def test_of_a_large_step_the_first_answers_are_measured_and_all_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    some, whole = records(), mask_metrics(records(), PARAMS)
    # The first answer has 9 kept ids, the second 12.
    monkeypatch.setattr(measured, "MEASURED_IDS", 10)
    metrics = mask_metrics(some, PARAMS)
    assert bytes_of(metrics) != bytes_of(whole)
    assert bytes_of(metrics) == written(some[:2], some)
    same = {name for name in whole if not name.endswith("bytes_per_token")}
    assert {name: metrics[name] for name in same} == {name: whole[name] for name in same}


def test_without_masks_there_is_nothing() -> None:
    assert mask_metrics([replace(make_record(), sampling_mask=None)], PARAMS) == {}
