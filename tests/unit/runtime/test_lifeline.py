"""What a process started ends with it, however it ends: asked to first, with what left its group."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from moe_trm.runtime import lifeline
from moe_trm.runtime.lifeline import kill_marked, marked

OWNER = """
import os, subprocess, sys, time
from moe_trm.runtime.lifeline import Lifeline
mark, grace = sys.argv[1], float(sys.argv[2])
name, value = mark.split("=")
child = subprocess.Popen([sys.executable, "-c", sys.argv[3]], start_new_session=True, env={**os.environ, name: value})
lifeline = Lifeline(child.pid, grace_s=grace, mark=mark)
time.sleep(600)
"""
WORKER = """
import pathlib, signal, subprocess, sys, time
folder = pathlib.Path({folder!r})
def clean(*_):
    (folder / "cleaned").touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, {handler})
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
(folder / "begun").touch()
time.sleep(600)
"""


def gone(mark: str, patience_s: float = 60.0) -> bool:
    until = time.monotonic() + patience_s
    while marked(mark) and time.monotonic() < until:
        time.sleep(0.02)
    return not marked(mark)


@pytest.mark.parametrize(("grace_s", "handler"), [(60.0, "clean"), (0.2, "signal.SIG_IGN"), (0.0, "clean")])
def test_the_group_is_asked_first_and_nothing_stays(tmp_path: Path, grace_s: float, handler: str) -> None:
    """Within its grace it cleans up; one that ignores that is killed; without grace it is killed at once."""
    mark = f"MOE_TRM_TEST={tmp_path.name}-{time.time_ns()}"
    worker = WORKER.format(folder=str(tmp_path), handler=handler)
    try:
        with subprocess.Popen([sys.executable, "-c", OWNER, mark, str(grace_s), worker]) as owner:
            try:
                # A process whose program just starts shows no environment yet.
                while not (tmp_path / "begun").exists() or len(marked(mark)) < 2:
                    assert owner.poll() is None
                    time.sleep(0.01)
            finally:
                owner.kill()
        assert gone(mark)
        assert (tmp_path / "cleaned").exists() == (grace_s == 60.0)
    finally:
        kill_marked(mark)


def test_a_process_that_was_just_starting_a_program_is_found_by_a_second_look(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True) as late:
        looks = iter([[], [late.pid]])
        monkeypatch.setattr(lifeline, "marked", lambda _mark: next(looks))
        monkeypatch.setattr(lifeline, "signal_group", lambda _group, _number: False)
        monkeypatch.setattr(signal, "signal", lambda _number, _handler: None)
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"")))
        lifeline._watch(late.pid, 0.0, "A=B")
        try:
            assert late.wait(60) == -signal.SIGKILL
        finally:
            late.kill()
