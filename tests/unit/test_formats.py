"""Stored files of every format: today's are read as they were written, older ones are refused with what to do.

Who changes a format keeps these files, adds those of the new one, and either reads the old or keeps the refusal.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from moe_trm.config.schema import Config
from moe_trm.errors import BundleError, CheckpointError
from moe_trm.learner.checkpoint.folder import STATE_FILE, read_manifest, verify
from moe_trm.learner.checkpoint.pieces import PieceReader
from moe_trm.learner.checkpoint.resumption import Checkpoints
from moe_trm.recording.bundle import BundleReader
from moe_trm.recording.scores import ScoresReader
from moe_trm.runtime.interruption import Interruption
from moe_trm.types import SessionTurn
from routing import token_digest

DATA = Path(__file__).resolve().parents[1] / "data"


@pytest.mark.parametrize("name", ["bundle-4", "bundle-5", "bundle-6"])
def test_a_bundle_of_format_4_to_6(name: str) -> None:
    reader = BundleReader(str(DATA / name))
    assert reader.steps() == [1]
    assert reader.header(1).rejected == {4: "mask_violation"}
    records = reader.read(1)[:4]
    assert [record.tokens.tolist() for record in records] == [
        [5, 6, 7, 8, 9],
        [5, 6, 7, 3],
        [5, 6, 4],
        [5, 6, 2, 2, 2, 2],
    ]
    assert [record.sample_id for record in records] == [0, 1, 2, 3]
    assert [record.group_id for record in records] == [0, 0, 1, 1]
    assert [record.prompt_id for record in records] == ["p0", "p0", "p1", "p1"]
    assert [record.finish_reason for record in records] == ["length", "stop", "stop", "stop"]
    assert [record.reward for record in records] == [1.0, 0.0, 0.5, None]
    assert records[0].reward_parts == {"right": 1.0}
    assert [record.sampled.tolist() for record in records[1:3]] == [[False, False, True, True], [False, False, True]]
    assert records[3].rollout_logprobs.tolist() == [-0.25, -0.5, -0.75, -1.0]
    assert records[0].full_logprobs.tolist() == [-0.5, -1.0, -1.5]
    assert records[0].versions.tolist() == [0, 0, 1]


@pytest.mark.parametrize("name", ["bundle-4", "bundle-5", "bundle-6"])
def test_routes_and_masks_of_a_bundle_of_format_4_to_6(name: str) -> None:
    """Routes of format 4 are bound to their tokens alone; reading binds them to their samples."""
    records = BundleReader(str(DATA / name)).read(1)[:4]
    assert [record.routes is None for record in records] == [False, False, True, False]
    assert all(record.row == 0 and record.session == () for record in records)
    for record in (records[0], records[3]):
        assert record.routes is not None
        row_TLK = np.arange(record.num_tokens - 1)[:, None, None] + [[0, 1], [1, 2]]
        assert np.array_equal(record.routes.experts, row_TLK % 4)
        assert (record.routes.layer_ids, record.routes.num_experts) == ((0, 2), 4)
        assert record.routes.token_digest == token_digest(record.tokens, record.origin)
    mask = records[0].sampling_mask
    assert mask is not None
    assert mask.logprobs is not None
    assert (mask.ids.tolist(), mask.offsets.tolist()) == ([7, 8, 8, 9, 9, 10], [0, 2, 4, 6])
    np.testing.assert_allclose(np.exp(mask.logprobs), [0.75, 0.25] * 3, rtol=1e-6)
    assert records[3].sampling_mask is None


def test_a_session_in_a_bundle_of_format_6() -> None:
    """Sample 5 is two rows: its second answer has the first as context."""
    first, second = BundleReader(str(DATA / "bundle-6")).read(1)[4:]
    assert [(row.sample_id, row.row, row.group_id) for row in (first, second)] == [(5, 0, 1), (5, 1, 1)]
    assert first.session == second.session == (SessionTurn(-1, 2, 2, 0), SessionTurn(0, 1, 1, 1, cut=True))
    assert first.tokens.tolist() == [5, 6, 7, 8]
    assert second.tokens.tolist() == [5, 6, 7, 8, 9, 3]
    assert second.sampled.tolist() == [False] * 5 + [True]
    assert (first.rollout_logprobs.tolist(), second.rollout_logprobs.tolist()) == ([-0.25, -0.5], [-0.75])
    for row in (first, second):
        assert row.routes is not None
        assert row.routes.token_digest == token_digest(row.tokens, row.origin)


@pytest.mark.parametrize("name", ["scores-1", "scores-2"])
def test_scores_of_format_1_or_2(name: str) -> None:
    (update,) = ScoresReader(DATA / name).read(1)
    assert (update.num_sequences, update.num_tokens, update.recovery, update.version) == (4, 6, "same", 1)
    assert update.kl_coef == 0.5
    assert len(update.batches) == 2
    assert [batch.sample_ids.tolist() for batch in update.batches] == [[0, 1], [2, 3]]
    assert [batch.group_ids.tolist() for batch in update.batches] == [[0, 0], [1, 1]]
    for batch in update.batches:
        assert batch.mask.tolist() == [[True, True, False], [True, False, False]]
        assert batch.current_logprobs.tolist() == [[-1.25, -1.75, 0.0], [-0.5, 0.0, 0.0]]
        assert batch.rollout_logprobs[batch.mask].tolist() == [-1.0, -2.0, -0.5]
        assert batch.advantages[batch.mask].tolist() == [1.0, 1.0, -1.0]
        assert batch.rewards.tolist() == [1.0, 0.0]
        assert batch.versions[batch.mask].tolist() == [1, 1, 1]
        assert batch.anchor_logprobs is not None
        assert batch.anchor_logprobs[batch.mask].tolist() == [-1.25, -2.0, -0.5]
        assert batch.exact_kl is not None
        assert batch.exact_kl[batch.mask].tolist() == [0.25, 0.125, 0.0]
        assert batch.behavior_logprobs is None
    tokens = [None if batch.sample_tokens is None else batch.sample_tokens.tolist() for batch in update.batches]
    assert tokens == ([None, None] if name == "scores-1" else [[3, 3], [2, 1]])


def test_a_checkpoint_of_format_2() -> None:
    path = DATA / "checkpoint-2" / "step-000002"
    manifest = read_manifest(path)
    assert (manifest.step, manifest.config) == (2, {"name": "run", "train": {"steps": 4}})
    verify(path, manifest, sorted(manifest.files))
    state = msgspec.msgpack.decode((path / STATE_FILE).read_bytes())
    assert state == {"learner": {"optimizer_steps": 4}, "run": {"judge": [1, 2], "window": b"\0\1"}}
    reader = PieceReader(path / name for name in sorted(manifest.files) if name != STATE_FILE)
    assert reader.names("") == ["exp_avg/matrix", "weight/half", "weight/norm"]
    assert reader.read("weight/norm", (3,)).tolist() == [1.0, 2.0, 3.0]
    assert reader.read("exp_avg/matrix", (2, 3)).tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    half = reader.read("weight/half", (2, 2))
    assert half.dtype == torch.bfloat16
    assert half.tolist() == [[0.5, 1.5], [-1.0, 2.5]]


def test_a_bundle_of_the_format_before_is_refused_with_what_to_do() -> None:
    reader = BundleReader(str(DATA / "bundle-3"))
    for read in (reader.read, reader.header):
        with pytest.raises(BundleError, match="another format") as refused:
            read(1)
        said = str(refused.value)
        assert "moe-trm-bundle 3" in said
        assert "moe-trm-bundle 7 or 6 or 5 or 4" in said
        assert "Record the run again, or read it with the version of moe-trm that wrote it (older" in said


def test_a_checkpoint_of_the_format_before_is_refused_with_what_to_do() -> None:
    with pytest.raises(CheckpointError, match="another format") as refused:
        read_manifest(DATA / "checkpoint-1" / "step-000002")
    said = str(refused.value)
    assert "moe-trm-checkpoint 1" in said
    assert "moe-trm-checkpoint 2" in said
    assert "Go on with the version of moe-trm that wrote it (older" in said
    assert "checkpoint.resume=never" in said


def test_a_run_does_not_begin_anew_over_checkpoints_of_the_format_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(DATA / "checkpoint-1", tmp_path / "checkpoints")
    config = Config.model_validate({"model": {"checkpoint": "unused"}, "checkpoint": {"every": 2}})
    with pytest.raises(CheckpointError, match="no checkpoint of this run can be used"):
        Checkpoints(config, tmp_path, Interruption())
    assert "a checkpoint of another format" in caplog.text
    assert (tmp_path / "checkpoints" / "step-000002" / "manifest.json").is_file()


READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "bundle-6": ("step-000001.safetensors", lambda folder: BundleReader(str(folder)).read(1)),
    "scores-2": ("scores-000001-rank-000.safetensors", lambda folder: ScoresReader(folder).read(1)),
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize(("change", "age"), [(-1, "older"), (1, "newer")])
def test_other_numbers_are_refused_with_what_to_do(tmp_path: Path, name: str, change: int, age: str) -> None:
    file, read = READERS[name]
    folder = shutil.copytree(DATA / name, tmp_path / name)
    with safe_open(folder / file, framework="np") as opened:
        header = msgspec.json.decode(opened.metadata()["bundle"])
    header["version"] += change * (3 if name == "bundle-6" else 2)  # the formats before are read, too
    save_file(load_file(folder / file), folder / file, metadata={"bundle": msgspec.json.encode(header).decode()})
    with pytest.raises(BundleError, match="another format") as refused:
        read(folder)
    assert f"the version of moe-trm that wrote it ({age} than this one" in str(refused.value)
