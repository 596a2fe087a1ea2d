"""Recordings are never mixed: not by a run that records, and not unseen by a reader."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from launch.start.preflight import check_launch
from moe_trm.config import load
from moe_trm.errors import BundleError, ConfigError
from moe_trm.models.tiny.families import make_family
from moe_trm.recording.bundle import BundleReader, BundleWriter
from moe_trm.recording.existing import check_not_anothers
from moe_trm.recording.scores import CONFIG_FILE, ScoredBatch, ScoredUpdate, write_scores
from moe_trm.tools.whatif.recording import load as load_recording
from tests.unit.records import make_record

RUN = ("runs", "mine")


def rollouts(folder: Path, *, shift: float = 0.0) -> list[np.ndarray]:
    """Two records of step 1 in `folder`, and their log-probs."""
    records = [make_record(sample_id=0), make_record(sample_id=1)]
    for record in records:
        record.rollout_logprobs[:] -= shift
    BundleWriter(str(folder)).write(1, records)
    return [record.rollout_logprobs for record in records]


def scores(folder: Path, logprobs: list[np.ndarray]) -> None:
    """Scores of these log-probs as one update of step 1, with their configuration."""
    width = max(map(len, logprobs))
    mask = torch.tensor([[place < len(own) for place in range(width)] for own in logprobs])
    values = torch.zeros(mask.shape).masked_scatter(mask, torch.from_numpy(np.concatenate(logprobs)))
    zeros = torch.zeros(mask.shape, dtype=torch.int32)
    batch = ScoredBatch(
        mask=mask,
        rollout_logprobs=values,
        current_logprobs=values,
        advantages=values,
        turn_ids=zeros,
        versions=zeros,
        sample_ids=torch.arange(len(logprobs)),
        group_ids=torch.zeros(len(logprobs), dtype=torch.int64),
        rewards=torch.zeros(len(logprobs)),
    )
    write_scores(folder, 1, [ScoredUpdate((batch,), len(logprobs), int(mask.sum()))], data_rank=0, data_size=1)
    config = load_defaults()
    (folder / CONFIG_FILE).write_text(json.dumps(config))


def load_defaults() -> dict[str, object]:
    return {"model": {"checkpoint": "none"}, "run_dir": RUN[0], "name": RUN[1]}


def test_an_empty_or_missing_folder_is_free(tmp_path: Path) -> None:
    check_not_anothers(tmp_path, RUN, goes_on=False)
    check_not_anothers(tmp_path / "missing", RUN, goes_on=False)


def test_a_new_run_never_replaces_a_recording(tmp_path: Path) -> None:
    rollouts(tmp_path)
    before = BundleReader(str(tmp_path)).logprobs(1)
    with pytest.raises(ConfigError, match=r"(?s)record\.bundle.*steps 1 to 1"):
        check_not_anothers(tmp_path, RUN, goes_on=False)
    after = BundleReader(str(tmp_path)).logprobs(1)
    assert all(np.array_equal(before[number], after[number]) for number in (0, 1))


def test_a_run_that_goes_on_adds_to_its_own_recording_only(tmp_path: Path) -> None:
    scores(tmp_path, rollouts(tmp_path))
    check_not_anothers(tmp_path, RUN, goes_on=True)
    with pytest.raises(ConfigError):
        check_not_anothers(tmp_path, ("runs", "another"), goes_on=True)


def test_launch_refuses_before_anything_starts(tmp_path: Path) -> None:
    checkpoint = make_family("qwen3_moe", tmp_path / "model")
    rollouts(tmp_path / "bundle")
    run = {
        "model": {"checkpoint": str(checkpoint)},
        "run_dir": str(tmp_path),
        "record": {"bundle": str(tmp_path / "bundle")},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(run))
    config = load(str(tmp_path / "run.yaml"), [])
    with pytest.raises(ConfigError, match=r"record\.bundle"):
        check_launch(config, world_size=1)
    check_launch(config, world_size=1, restarted=True)


def test_whatif_refuses_scores_of_another_run(tmp_path: Path) -> None:
    scores(tmp_path, rollouts(tmp_path))
    assert load_recording(tmp_path).trained
    rollouts(tmp_path, shift=1e-3)
    with pytest.raises(BundleError, match="different runs"):
        load_recording(tmp_path)
