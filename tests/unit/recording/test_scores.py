"""Scores come back as they were written, rank after rank, or a `BundleError`."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from moe_trm.config.schema import Config
from moe_trm.errors import BundleError
from moe_trm.recording.scores import ScoredBatch, ScoredUpdate, ScoresReader, write_scores
from moe_trm.step.score_recorder import ScoreRecorder


def batch(seed: int, rows: int = 2, columns: int = 5, *, kl: bool = True) -> ScoredBatch:
    gen = torch.Generator().manual_seed(seed)
    mask = torch.rand(rows, columns, generator=gen) < 0.6
    mask[0, 0] = True

    def values() -> torch.Tensor:
        return torch.where(mask, torch.randn(rows, columns, generator=gen), 0.0)

    return ScoredBatch(
        mask=mask,
        rollout_logprobs=values(),
        anchor_logprobs=values(),
        current_logprobs=values(),
        advantages=values(),
        turn_ids=torch.where(mask, 1, 0).short(),
        versions=torch.where(mask, 3, 0).int(),
        sample_ids=torch.arange(rows) + 10 * seed,
        group_ids=torch.arange(rows),
        rewards=torch.rand(rows, generator=gen),
        exact_kl=values().abs() if kl else None,
    )


def update(seed: int) -> ScoredUpdate:
    return ScoredUpdate((batch(seed), batch(seed + 1, rows=1, columns=7)), num_sequences=6, num_tokens=40)


def assert_same(one: ScoredBatch, two: ScoredBatch) -> None:
    for field in fields(ScoredBatch):
        left, right = getattr(one, field.name), getattr(two, field.name)
        assert (left is None) == (right is None), field.name
        if left is not None:
            assert left.dtype == right.dtype
            assert torch.equal(left, right), field.name


def write(folder: Path, step: int = 1) -> None:
    for rank in range(2):
        write_scores(folder, step, [update(4 * rank), update(4 * rank + 2)], data_rank=rank, data_size=2)


def test_updates_come_back_with_the_batches_of_all_ranks(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "scores-..-rank-000.safetensors").write_bytes(b"")
    reader = ScoresReader(tmp_path)
    assert reader.steps() == [1]
    updates = reader.read(1)
    assert [(one.num_sequences, one.num_tokens) for one in updates] == [(6, 40), (6, 40)]
    for place, one in enumerate(updates):
        expected = [*update(2 * place).batches, *update(4 + 2 * place).batches]
        for left, right in zip(expected, one.batches, strict=True):
            assert_same(left, right)


def test_what_no_batch_has_is_not_there(tmp_path: Path) -> None:
    bare = ScoredUpdate((batch(0, kl=False),), 2, 10)
    write_scores(tmp_path, 3, [bare], data_rank=0, data_size=1)
    assert ScoresReader(tmp_path).read(3)[0].batches[0].exact_kl is None


def test_cuts_and_flipped_bits_are_noticed(tmp_path: Path) -> None:
    write(tmp_path)
    path = tmp_path / "scores-000001-rank-001.safetensors"
    whole = path.read_bytes()
    for length in (0, 7, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(BundleError, match="damaged or truncated"):
            ScoresReader(tmp_path).read(1)
    for position in range(8, len(whole), 53):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        with pytest.raises(BundleError):
            ScoresReader(tmp_path).read(1)


def test_shapes_that_the_arrays_do_not_fill_are_refused(tmp_path: Path) -> None:
    """A header rewritten together with its checksum still cannot make the reader allocate or misplace anything."""
    one = update(0)
    lying = replace(one.batches[0], anchor_logprobs=torch.zeros(9, 9))
    with pytest.raises(IndexError):
        write_scores(tmp_path, 1, [replace(one, batches=(lying,))], data_rank=0, data_size=1)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("left", [0, 1])
def test_a_missing_rank_is_told(tmp_path: Path, left: int) -> None:
    write(tmp_path)
    (tmp_path / f"scores-000001-rank-00{left}.safetensors").unlink()
    with pytest.raises(BundleError, match="some learner ranks are missing"):
        ScoresReader(tmp_path).read(1)


def test_scores_of_runs_on_other_numbers_of_ranks_are_not_joined(tmp_path: Path) -> None:
    write_scores(tmp_path, 1, [update(0)], data_rank=0, data_size=2)
    write_scores(tmp_path, 1, [update(1)], data_rank=1, data_size=3)
    with pytest.raises(BundleError, match="it is of rank 1 of 3"):
        ScoresReader(tmp_path).read(1)
    for rank in range(3):
        write_scores(tmp_path, 1, [update(rank)], data_rank=rank, data_size=2)
    with pytest.raises(BundleError, match=r"ranks \[0, 1, 2\]"):
        ScoresReader(tmp_path).read(1)


def test_a_step_that_was_not_recorded(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="no scores of this step"):
        ScoresReader(tmp_path).read(1)


def test_a_shorter_run_in_the_same_folder_leaves_nothing_of_a_longer_one(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        for rank in range(3):
            write_scores(tmp_path, step, [update(rank)], data_rank=rank, data_size=3)
    config = Config.model_validate({"model": {"checkpoint": "none"}, "record": {"bundle": str(tmp_path)}})
    recorders = [ScoreRecorder(config, rank, 2) for rank in range(2)]
    for step in (1, 2):
        for recorder in recorders:
            recorder.write(step)
    assert ScoresReader(tmp_path).steps() == [1, 2]
    assert ScoresReader(tmp_path).read(2) == []
    assert len(list(tmp_path.glob("scores-*"))) == 4
