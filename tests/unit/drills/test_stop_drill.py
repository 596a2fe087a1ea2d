"""The drill of stops: its processes exist, it looks where no other program is, and it lists all that is left."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks.processes import ROLES
from tests.drills import stop_drill
from tests.drills.apart import run_isolated
from tests.drills.stop_drill import MOMENTS, NAME, find_leftovers, names_of

ALONE = """
import os
processes = [name for name in os.listdir("/proc") if name.isdigit()]
print(len(processes), os.listdir("/dev/shm"), file=open("seen", "w"))
"""


def test_every_moment_is_seen_by_a_process_that_a_run_has() -> None:
    assert len(MOMENTS) == 14
    assert {moment.sees for moment in MOMENTS} <= {*ROLES.values(), "step"}
    assert {moment.victim for moment in MOMENTS} <= {*ROLES.values()}


def test_all_that_a_run_left_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("shm", "tmp", NAME):
        (tmp_path / folder).mkdir()
    monkeypatch.setattr(stop_drill, "SHARED", tmp_path / "shm")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        monkeypatch.setattr(stop_drill, "other_processes", lambda: [psutil.Process(process.pid)])
        (tmp_path / "shm" / "moe-trm-a").mkdir()
        (tmp_path / "tmp" / "moe-trm-b").mkdir()
        (tmp_path / NAME / ".controller-access.json.x").touch()
        leftovers = find_leftovers(tmp_path, 0.1)
        assert names_of(leftovers).split(", ")[1:] == ["moe-trm-a", "moe-trm-b", ".controller-access.json.x"]
        assert len(leftovers.processes) == 1
        process.communicate(b"\n")
    monkeypatch.setattr(stop_drill, "other_processes", list)
    for path in ("shm/moe-trm-a", "tmp/moe-trm-b"):
        (tmp_path / path).rmdir()
    (tmp_path / NAME / ".controller-access.json.x").unlink()
    assert not names_of(find_leftovers(tmp_path, 60.0))


def test_a_benchmark_apart_sees_no_other_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("unshare") is None or subprocess.run(["unshare", "--mount", "true"], check=False).returncode:
        pytest.skip("this machine gives no namespaces")
    (tmp_path / "alone.py").write_text(ALONE)
    monkeypatch.chdir(tmp_path)
    assert run_isolated("alone", []) == 0
    assert (tmp_path / "seen").read_text() == "2 []\n"
