"""Dumps of other frameworks, written here in their formats."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moe_trm.config.schema import CorrectionConfig, LossConfig
from moe_trm.errors import BundleError
from moe_trm.tools.whatif.judge import Candidate, judge
from moe_trm.tools.whatif.recording import load

ROLLOUT = ([-1.0, -2.0, -3.0], [-0.5, -0.25])
LEARNER = ([-1.5, -2.0, -3.0], [-0.5, -0.75])
MASKS = ([1, 1, 0], [1, 1])
REWARDS = (1.0, 0.0)


def columns() -> dict[str, Any]:
    """Per-sample columns as slime and miles name them."""
    return {
        "rollout_log_probs": [torch.tensor(values) for values in ROLLOUT],
        "log_probs": [torch.tensor(values) for values in LEARNER],
        "loss_masks": [torch.tensor(values) for values in MASKS],
        "advantages": [torch.full((3,), 0.7), torch.full((2,), -0.7)],
        "rewards": [0.5, -0.5],
    }


def slime(path: Path, **changes: Any) -> Path:
    """`--save-debug-train-data`, format version 2: a list of samples and the raw rewards of the whole batch."""
    samples = [
        {"sample_index": 7 + n, "rollout_position": n, "tokens": torch.arange(5)}
        | {k: v[n] for k, v in columns().items()}
        for n in range(2)
    ]
    for sample in samples:
        sample |= changes
    torch.save({"format_version": 2, "rollout_id": 3, "rank": 0, "samples": samples, "raw_reward": list(REWARDS)}, path)
    return path


def miles(path: Path, rank: int = 0, cp_size: int = 1, **changes: Any) -> Path:
    """One file per rank: columns of that rank's samples."""
    data = {**columns(), "sample_indices": [7, 8], "rewards": list(REWARDS), "metadata": [np.zeros(1), None], **changes}
    torch.save({"rollout_id": 3, "rank": rank, "rollout_data": data, "cp_rank": 0, "cp_size": cp_size}, path)
    return path


def verl(path: Path, **changes: Any) -> Path:
    """The tensors of `DataProto.batch`, right-padded."""
    data: dict[str, Any] = {
        "rollout_log_probs": torch.tensor([ROLLOUT[0], [*ROLLOUT[1], 0.0]]),
        "old_log_probs": torch.tensor([LEARNER[0], [*LEARNER[1], 0.0]]),
        "response_mask": torch.tensor([MASKS[0], [*MASKS[1], 0]]),
        "advantages": torch.tensor([[0.7] * 3, [-0.7] * 3]),
        "token_level_scores": torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]),
    }
    torch.save({name: value for name, value in (data | changes).items() if value is not None}, path)
    return path


@pytest.mark.parametrize("write", [slime, miles, verl])
def test_all_three_hold_the_same(tmp_path: Path, write: Any) -> None:
    recording = load(write(tmp_path / "3.pt"))
    assert (recording.trained, recording.grouped, list(recording.steps)) == (False, False, [3])
    (update,) = recording.steps[3]
    (batch,) = update.batches
    assert (update.num_sequences, update.num_tokens) == (2, 4)
    assert batch.mask.tolist() == [[True, True, False], [True, True, False]]
    assert batch.rollout_logprobs.tolist() == [[-1.0, -2.0, 0.0], [-0.5, -0.25, 0.0]]
    assert batch.anchor_logprobs is not None
    assert batch.anchor_logprobs.tolist() == [[-1.5, -2.0, 0.0], [-0.5, -0.75, 0.0]]
    assert torch.equal(batch.current_logprobs, batch.anchor_logprobs)
    assert batch.advantages[:, 0].tolist() == pytest.approx([0.7, -0.7])
    assert batch.rewards.tolist() == [1.0, 0.0]


def test_rewards_that_a_dump_lacks_are_unknown(tmp_path: Path) -> None:
    """`dispo` asks whether an answer is right: by its reward, and by its advantage where no reward is known."""
    dispo: list[dict[str, float]] = []
    for number, scores in enumerate((torch.eye(3)[:2] * torch.tensor([[1.0], [0.0]]), None)):
        recording = load(verl(tmp_path / f"{number}.pt", token_level_scores=scores))
        (batch,) = recording.steps[number][0].batches
        assert (batch.rewards is None) == (scores is None)
        loss = LossConfig(name="dispo", clip_low=None, clip_high=None)
        outcome = judge(Candidate("dispo", CorrectionConfig(), loss), recording.config, recording.steps)
        assert not outcome.refused
        assert outcome.pooled is not None
        dispo.append(dict(outcome.pooled))
    assert dispo[0] == dispo[1]


def test_files_of_a_step_are_joined_and_repeated_samples_count_once(tmp_path: Path) -> None:
    miles(tmp_path / "3_0.pt", rank=0)
    miles(tmp_path / "3_1.pt", rank=1)
    miles(tmp_path / "3_2.pt", rank=2, sample_indices=[9, 10])
    assert load(tmp_path).steps[3][0].num_sequences == 4


@pytest.mark.parametrize(
    ("write", "change", "message"),
    [
        (slime, {"log_probs": None}, "--save-debug-train-data"),
        (slime, {"rollout_log_probs": None}, "no rollout_log_probs"),
        (slime, {"advantages": None}, "no advantages"),
        (slime, {"loss_masks": None}, "no loss mask"),
        (miles, {"loss_masks": None}, "no loss mask"),
        (slime, {"advantages": torch.zeros(9)}, r"columns of"),
        (
            slime,
            {
                "log_probs": torch.full((3,), torch.nan),
                "loss_masks": torch.ones(3),
                "rollout_log_probs": torch.zeros(3),
                "advantages": torch.zeros(3),
            },
            "not finite",
        ),
        (miles, {"cp_size": 2}, "context-parallel"),
        (miles, {"log_probs": None}, "its columns are"),
        (verl, {"rollout_log_probs": None}, "no tensor rollout_log_probs"),
    ],
)  # fmt: skip
def test_what_is_missing_is_named(tmp_path: Path, write: Any, change: dict[str, Any], message: str) -> None:
    with pytest.raises(BundleError, match=message):
        load(write(tmp_path / "0.pt", **change))


class Bomb:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("executed"),))


def test_nothing_in_a_file_is_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"samples": [Bomb()]}, tmp_path / "torch.pt")
    (tmp_path / "proto.pkl").write_bytes(pickle.dumps(Bomb()))
    (tmp_path / "noise.pt").write_bytes(b"not a file of torch")
    torch.save([1], tmp_path / "list.pt")
    for name in ("torch.pt", "proto.pkl", "noise.pt", "list.pt"):
        with pytest.raises(BundleError):
            load(tmp_path / name)
    assert not (tmp_path / "executed").exists()


def test_a_log_of_texts_has_nothing_to_judge(tmp_path: Path) -> None:
    (tmp_path / "1.jsonl").write_text('{"input": "1+1=", "output": "2", "gts": "2", "score": 1.0, "step": 1}\n')
    with pytest.raises(BundleError, match="texts and scores only"):
        load(tmp_path)


def test_a_folder_without_recordings(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="no recording here"):
        load(tmp_path)
    (tmp_path / "step-000001.safetensors").write_bytes(b"")
    with pytest.raises(BundleError, match="no scores"):
        load(tmp_path)
