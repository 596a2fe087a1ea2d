"""Metrics of a step's sampling masks, against what the codec writes and what records hold."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from moe_trm.rollout import sample_metrics as measured
from moe_trm.rollout.sample_metrics import mask_metrics
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


def of_several_sizes(record: RolloutRecord) -> RolloutRecord:
    """The record with sets of 1, 2, 3, 1, ... of the three ids of each."""
    mask = record.sampling_mask
    assert mask is not None
    assert mask.logprobs is not None
    sizes = 1 + np.arange(mask.num_rows) % 3
    kept = (np.arange(3) < sizes[:, None]).reshape(-1)
    smaller = SamplingMask(mask.ids[kept], np.concatenate([[0], np.cumsum(sizes)]), mask.logprobs[kept])
    return replace(record, sampling_mask=smaller)


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


def test_ids_of_prompts_take_no_part() -> None:
    some = records()
    tokens = some[0].tokens.copy()
    tokens[0] = 1_000_000
    assert mask_metrics([replace(some[0], tokens=tokens), *some[1:]], PARAMS) == mask_metrics(some, PARAMS)


def test_sizes_and_masses_are_those_of_the_tokens_that_were_not_dropped() -> None:
    """Against a loop over tokens; the dropped one lies outside of all masks, and would be the largest id."""
    some = records()
    *others, last = some
    full, tokens = last.full_logprobs.copy(), last.tokens.copy()
    full[1], tokens[np.flatnonzero(last.sampled)[1]] = -50.0, 99
    some = [*map(of_several_sizes, others), replace(last, full_logprobs=full, tokens=tokens)]
    sizes, masses = list[int](), list[float]()
    for record in some:
        assert record.sampling_mask is not None
        for place, size in enumerate(np.diff(record.sampling_mask.offsets).tolist()):
            if size:
                sizes.append(size)
                masses.append(np.exp(min(record.full_logprobs[place] - record.rollout_logprobs[place], 0.0)))
    metrics = mask_metrics(some, PARAMS)
    prefix = "sampling_mask/size_"
    assert metrics[f"{prefix}mean"] == np.mean(sizes)
    assert metrics[f"{prefix}median"] == np.median(sizes)
    assert metrics[f"{prefix}p99"] == pytest.approx(np.quantile(sizes, 0.99))
    assert metrics[f"{prefix}max"] == max(sizes)
    assert metrics["sampling_mask/singleton_fraction"] == np.mean([size == 1 for size in sizes])
    assert metrics["sampling_mask/kept_mass_mean"] == pytest.approx(np.mean(masses))
    assert bytes_of(metrics) != bytes_of(mask_metrics(records(), PARAMS)), "a vocabulary that has the id"


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


def test_a_kept_mass_that_the_engine_does_not_tell_is_left_out() -> None:
    told = mask_metrics(records(), PARAMS)
    untold = [replace(record, full_logprobs=np.full_like(record.full_logprobs, np.nan)) for record in records()]
    assert told.keys() - mask_metrics(untold, PARAMS).keys() == {"sampling_mask/kept_mass_mean"}
