"""The benchmark of log-probs runs and writes what it promises, at a size that takes no time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_rows_of_a_small_run(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    sizes = [
        "--vocab",
        "3000",
        "--hidden",
        "16",
        "--tokens",
        "64",
        "--alone",
        "96",
        "--longest",
        "128",
        "--repeats",
        "1",
    ]
    command = [sys.executable, "-m", "benchmarks.logprobs", "--json", str(path), "--device", "cpu", *sizes]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "time_ratio" in done.stdout
    rows = json.loads(path.read_text())["rows"]
    assert [(row["kind"], row["tokens"]) for row in rows] == [
        ("full", 64),
        ("masked", 64),
        ("full, forward", 96),
        ("masked", 128),
        ("masked with KL", 128),
        ("codec", 20_000),
    ]
    assert all(row["time_ratio"] > 0 for row in rows[:2])
    assert 1 <= rows[-1]["codec_ratio"] <= 1.15
