"""The doctor's judgement on faults planted into a real learner.

This is a slice of `python -m benchmarks.planted_faults`, whose matrix is in docs/doctor.md.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.lies import suffices


@pytest.mark.slow
def test_severe_faults_are_named_and_clean_controls_are_not(brief_checkpoint: Path, tmp_path: Path) -> None:
    """One seed. Faults of rounding and of weights need a trained model and later versions; the benchmark has them."""
    only = ["clean", "rope base", "temperature", "mask off", "one expert permuted", "tokenizers differ", "failed sync"]
    command = [sys.executable, "-m", "benchmarks.planted_faults", "--checkpoint", str(brief_checkpoint), "--seeds", "0"]
    command += ["--json", str(tmp_path / "rows.json"), "--only", *only]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=dict(os.environ), timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    print(done.stdout[done.stdout.index("The doctor on planted faults") :])
    rows = json.loads((tmp_path / "rows.json").read_text())["visits"]
    severe = [row for row in rows if row["severity"] == "severe"]
    assert {row["fault"] for row in severe} == set(only)
    wrong = [row for row in severe if row["found"] != row["expected"]]
    assert wrong == []


@pytest.mark.slow
def test_every_lie_is_told_or_stopped_and_clean_records_are_not(brief_checkpoint: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.planted_faults", "--lies", "--checkpoint", str(brief_checkpoint)]
    command += ["--seeds", "0", "--json", str(tmp_path / "rows.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=dict(os.environ), timeout=900)
    print(done.stdout)
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row for row in rows if not suffices(row)] == []
    assert done.returncode == 0, done.stderr[-2000:]
