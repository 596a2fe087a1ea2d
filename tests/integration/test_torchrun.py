"""A refused configuration under the real torchrun: the reason once, no traceback of ours, and a status of failure."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from moe_trm.errors import REFUSED

REPOSITORY = Path(__file__).resolve().parents[2]


def test_the_reason_is_told_once(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("model: {checkpoint: nowhere}\nreplay: {mode: R9}\n")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "-m", "launch.train", str(tmp_path / "config.yaml")],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 1
    assert done.stderr.count("configuration refused, 1 problem") == 1
    assert "replay.mode" in done.stderr
    # What follows is torchrun's own report. It names the status that torchrun saw, and no file of ours.
    assert f"exitcode  : {REFUSED}" in done.stderr
    assert f"{REPOSITORY}/launch" not in done.stderr
