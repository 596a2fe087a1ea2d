"""One process at a time holds a folder, and a killed one holds nothing."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from moe_trm.errors import REFUSED, RunError
from moe_trm.runtime import lock
from moe_trm.runtime.lock import held_alone, holder_of

HOLDS = """
import subprocess, sys, time
from pathlib import Path
from moe_trm.runtime.lock import held_alone
with held_alone(Path(sys.argv[1]), "works here"):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print(child.pid, flush=True)
    time.sleep(600)
"""


def test_the_second_is_told_who_and_a_killed_holder_with_living_children_holds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "folder" / ".lock"
    assert holder_of(path) is None
    with subprocess.Popen([sys.executable, "-c", HOLDS, str(path)], stdout=subprocess.PIPE) as first:
        assert first.stdout is not None
        child = int(first.stdout.readline())
        try:
            second = held_alone(path, "works elsewhere", patience_s=0.0, fix="go away")
            with pytest.raises(RunError, match=f"works elsewhere.*\n.*process {first.pid} on ") as told, second:
                raise AssertionError("two hold it")
            assert told.value.exit_status == REFUSED
            assert "or go away" in str(told.value)
            holder = holder_of(path)
            assert holder is not None
            assert holder.pid == first.pid
            first.kill()
            first.wait()
            with held_alone(path, "works here"):
                assert (path.stat().st_mode & 0o777) == 0o600
                holder = holder_of(path)
                assert holder is not None
                assert holder.pid == os.getpid()
        finally:
            os.kill(child, 9)
    assert holder_of(path) is None


def test_one_that_is_about_to_end_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    ends = HOLDS.replace("time.sleep(600)\n", "time.sleep(0.5)\n").replace("child = ", "# ").replace("child.pid", "1")
    with subprocess.Popen([sys.executable, "-c", ends, str(path)], stdout=subprocess.PIPE) as first:
        assert first.stdout is not None
        first.stdout.readline()
        with held_alone(path, "works here", patience_s=60.0):
            assert first.wait(60) == 0


def test_a_file_system_without_locks_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    with held_alone(tmp_path / ".lock", "works here"):
        assert "has no locks" in caplog.text
        assert holder_of(tmp_path / ".lock") is None


def test_a_folder_that_takes_no_writes_is_a_clear_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(path: Path, flags: int) -> int:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(lock, "open_private", read_only)
    with (
        pytest.raises(RunError, match=r"(?s)cannot be written.*Read-only file system"),
        held_alone(tmp_path / "x", "y"),
    ):
        pass
