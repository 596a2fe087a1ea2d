"""A refused configuration under the real torchrun: the reason once, no traceback, and an exit status of failure."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from launch.torchrun import is_refusal
from moe_trm.errors import REFUSED

REPOSITORY = Path(__file__).resolve().parents[2]


def installed(folder: Path) -> Path:
    """A folder for PYTHONPATH that says what an installation of this source says of its entry points."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    info = folder / "site" / "moe_trm-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0\n")
    tables = [
        f"[{group}]\n" + "".join(f"{name} = {target}\n" for name, target in names.items())
        for group, names in project["entry-points"].items()
    ]
    (info / "entry_points.txt").write_text("\n".join(tables))
    return info.parent


def test_the_reason_is_the_last_word(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("model: {checkpoint: nowhere}\nreplay: {mode: R9}\n")
    path = os.pathsep.join([str(installed(tmp_path)), str(REPOSITORY)])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "-m", "launch.train", str(tmp_path / "config.yaml")],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 1
    assert done.stderr.count("configuration refused, 1 problem") == 1
    assert "replay.mode" in done.stderr
    assert "Traceback" not in done.stderr
    assert "ChildFailedError" not in done.stderr


@pytest.mark.parametrize(
    ("name", "exitcodes", "silent"),
    [
        ("launch.train", [REFUSED], True),
        ("launch.train", [-15, REFUSED], True),
        ("launch.train", [1], False),
        ("another.module", [REFUSED], False),
    ],
)
def test_only_a_refusal_of_our_ranks_is_kept_silent_on(name: str, exitcodes: list[int], silent: bool) -> None:
    failures = {rank: ProcessFailure(rank, 100 + rank, code, "none") for rank, code in enumerate(exitcodes)}
    assert is_refusal(ChildFailedError(name, failures)) is silent


def test_other_errors_are_told() -> None:
    assert not is_refusal(ValueError("launch.train"))
