"""The example of pictures on the real engines: a few steps with proof, a resumption, and the whole release exported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.integration.jobs import metrics_of, run_job

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "pictures"


def tensors_in(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.slow
def test_a_run_is_proved_resumed_and_exported_with_its_tower(tmp_path: Path) -> None:
    rows_folder, start_folder = tmp_path / "runs" / "pictures", tmp_path / "start"
    made = ["start.py", str(rows_folder / "train.jsonl"), "--out", str(start_folder), "--until", "0.25"]
    for script, *arguments in (["shapes.py"], made):
        subprocess.run([sys.executable, str(EXAMPLE / script), *arguments], cwd=tmp_path, check=True)
    settings = [
        *(f"model.checkpoint={start_folder}", f"run_dir={tmp_path}", f"task.prompts={rows_folder / 'train.jsonl'}"),
        *(f"task.eval_prompts={rows_folder / 'heldout.jsonl'}", "task.eval_sets={}", "task.eval_size=8"),
        *("rollout.server.port=0", "rollout.prompts_per_step=4", "rollout.group_size=4", "checkpoint.every=1"),
    ]
    for steps in ("train.steps=2", "train.steps=3 checkpoint.allow_changes=true"):
        assert run_job(str(EXAMPLE / "config.yaml"), [*settings, *steps.split()], 1) == 0
    run = tmp_path / "pictures"
    rows = [row for row in metrics_of(run) if "replay/applied_fraction" in row]
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert row["replay/applied_fraction"] == 1.0
    exported, start = tensors_in(run / "checkpoints" / "final"), tensors_in(start_folder)
    assert exported.keys() == start.keys()
    tower = {name for name in start if ".visual." in name}
    assert tower
    assert {name for name in start if torch.equal(exported[name], start[name])} >= tower
    assert [name for name in start if not torch.equal(exported[name], start[name])]
