"""`doctor RUN --grown` on a run with a real SGLang server."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from moe_trm.run_folder.growth import GROWTH_FILE
from moe_trm.runtime.python import run_module
from tests.integration.jobs import run_job, write_config


@pytest.mark.slow
def test_the_command_splits_a_run_with_its_own_checkpoints_and_texts(brief_checkpoint: Path, tmp_path: Path) -> None:
    """At learning rate 0: exactly nothing of weights, of pushes and of scoring, and texts differ by chance."""
    config = write_config(tmp_path, brief_checkpoint)
    words = [
        f"record.bundle={tmp_path / 'bundle'}",
        "train.steps=3",
        "optimizer.lr=0",
        "checkpoint.every=1",
        "checkpoint.keep=3",
        "learner.parallel.expert=1",
        "rollout.server.dtype=float32",
        "rollout.server.startup_timeout_s=1200",
    ]
    assert run_job(config, words, 1) == 0
    run = tmp_path / "runs" / "live"
    command = run_module("moe_trm", "doctor", str(run), "--grown", "1", "2", "--rows", "6")
    done = subprocess.run(command, capture_output=True, text=True)
    printed = done.stdout
    assert done.returncode == 0, printed + done.stderr
    assert "not measured" not in printed, printed
    document = json.loads((run / GROWTH_FILE).read_text())
    assert document["because"] == {}, printed
    for rise in document["rises"]:
        assert sum(part["size"]["value"] for part in rise["parts"]) == pytest.approx(rise["total"]["value"], abs=1e-15)
        for part in rise["parts"]:
            if part["name"] in ("weights", "interaction"):
                assert part["size"]["value"] == 0, part
            assert abs(part["size"]["value"]) < 1e-6, part
