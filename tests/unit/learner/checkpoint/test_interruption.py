"""The first signal asks, a second one ends; `metrics.jsonl` is cut where a run goes on, and must be writable."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from moe_trm.errors import REFUSED, RunError
from moe_trm.observe.sinks import JsonLines, keep_steps
from moe_trm.runtime.interruption import ECHO_S, Interruption, Stopped


@pytest.fixture
def interruption() -> Iterator[Interruption]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    asked = Interruption()
    asked.install()
    asked.begin_steps()
    yield asked
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_a_request(interruption: Interruption, number: signal.Signals) -> None:
    assert not interruption.requested
    os.kill(os.getpid(), number)
    assert interruption.requested == number.name


def test_before_the_first_step_it_ends_whatever_waits(interruption: Interruption) -> None:
    starting = Interruption()
    starting.install()
    with pytest.raises(Stopped) as stopped:
        os.kill(os.getpid(), signal.SIGTERM)
    assert stopped.value.code == 128 + signal.SIGTERM
    assert starting.requested == "SIGTERM"
    assert not interruption.requested


def test_the_same_signal_from_terminal_and_launcher_is_one(interruption: Interruption) -> None:
    for _ in range(3):
        os.kill(os.getpid(), signal.SIGINT)
    assert interruption.requested == "SIGINT"


def test_a_second_signal_ends_the_process() -> None:
    program = (
        "import os, signal, time; from moe_trm.runtime.interruption import Interruption; "
        "i = Interruption(); i.install(); i.begin_steps();"
        f"os.kill(os.getpid(), signal.SIGTERM); time.sleep({ECHO_S} + 0.2); "
        "os.kill(os.getpid(), signal.SIGTERM); print('alive')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 128 + signal.SIGTERM
    assert done.stdout == ""


LINES = [b'{"step":0}\n', b'{"step":1,"a":2}\n', b'{"step":2}\n', b'{"step":3}\n']


@pytest.mark.parametrize(
    ("content", "last", "kept"),
    [
        (LINES, 2, LINES[:3]),
        (LINES, 7, LINES),
        ([*LINES[:3], b'{"step":3,"ha'], 3, LINES[:3]),
        ([*LINES[:3], b'{"step":3,"ha'], 1, LINES[:2]),
    ],
)
def test_metrics_are_cut_after_the_step_that_a_run_goes_on_from(
    tmp_path: Path, content: list[bytes], last: int, kept: list[bytes]
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join(content))
    keep_steps(path, last)
    assert path.read_bytes() == b"".join(kept)


def test_a_new_run_has_no_metrics_to_cut(tmp_path: Path) -> None:
    keep_steps(tmp_path / "metrics.jsonl", 5)
    assert not list(tmp_path.iterdir())


@contextmanager
def room_for_20_bytes() -> Iterator[None]:
    """A limit on the size of this process's files, as on a full disk.

    It holds for a moment only, since pytest writes files too.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_metrics_that_cannot_be_written_stop_the_run_with_the_reason(tmp_path: Path) -> None:
    metrics = JsonLines(tmp_path / "metrics.jsonl")
    for reason in ("the disk is full", "File too large"):
        with pytest.raises(RunError, match=reason) as told, room_for_20_bytes():
            metrics.write(1, {"reward/mean": 0.5})
        assert told.value.exit_status == REFUSED
    metrics.close()
    keep_steps(tmp_path / "metrics.jsonl", 1)
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""
