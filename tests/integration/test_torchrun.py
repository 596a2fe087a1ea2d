"""The real torchrun: a refused configuration has its reason once, and two ranks train a recorded step."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from moe_trm.config import load
from moe_trm.errors import REFUSED
from moe_trm.models.tiny.checkpoint import TinyShape, make_checkpoint
from tests.integration.jobs import metrics_of
from tests.integration.recordings import make_recording
from tests.integration.resume_support import CONFIG

REPOSITORY = Path(__file__).resolve().parents[2]


def train(folder: Path) -> subprocess.CompletedProcess[str]:
    """Two ranks of `config.yaml` in `folder`."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.run(
        [*command, "-m", "launch.train", str(folder / "config.yaml")],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
    )


@pytest.mark.long
def test_two_ranks_train_a_recorded_step(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "start", shape=TinyShape(layers=2, hidden=32, experts=4, expert_ffn=16))
    (tmp_path / "config.yaml").write_text(CONFIG.format(folder=tmp_path, steps=1))
    config = load(tmp_path / "config.yaml", [])
    make_recording(config, tmp_path / "bundle", 1)
    done = train(tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    row = metrics_of(tmp_path / config.name)[1]
    assert row["replay/applied_fraction"] == 1.0
    assert row["optimizer/grad_norm"] > 0


def test_the_reason_is_told_once(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("model: {checkpoint: nowhere}\nreplay: {mode: R9}\n")
    done = train(tmp_path)
    assert done.returncode == 1
    assert done.stderr.count("configuration refused, 1 problem") == 1
    assert "replay.mode" in done.stderr
    # What follows is torchrun's own report. It names the status that torchrun saw, and no file of ours.
    assert f"exitcode  : {REFUSED}" in done.stderr
    assert f"{REPOSITORY}/launch" not in done.stderr
