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
from moe_trm.runtime.interruption import Interruption


@pytest.fixture
def interruption() -> Iterator[Interruption]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    asked = Interruption()
    asked.install()
    asked.begin_steps()
    yield asked
    signal.set_wakeup_fd(-1)
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_a_request(interruption: Interruption, number: signal.Signals) -> None:
    assert not interruption.requested
    os.kill(os.getpid(), number)
    assert interruption.requested == number.name


ECHO_S = 1.0
HURRIED = f"""
import os, signal, sys, time
from moe_trm.runtime import interruption as module
module.ECHO_S, module.UNWIND_S = {ECHO_S}, 2.0
interruption = module.Interruption()
"""
"""The product waits five seconds each."""
UNHEARD = f"""{HURRIED}
import ctypes, threading
interruption.install()
library, lock = ctypes.CDLL(None), ctypes.create_string_buffer(64)
if sys.argv[1] == "steps":
    interruption.begin_steps()
def ask():
    for _ in range(2 if sys.argv[1] == "steps" else 1):
        time.sleep({2 * ECHO_S})
        os.kill(os.getpid(), signal.SIGTERM)
threading.Thread(target=ask).start()
try:
    if sys.argv[2] == "python":
        time.sleep(600)
    library.pthread_mutex_lock(lock), library.pthread_mutex_lock(lock)
finally:
    print("left", flush=True)
"""


@pytest.mark.parametrize("waits", ["python", "machine code"])
def test_before_the_first_step_it_ends_whatever_waits(waits: str) -> None:
    command = [sys.executable, "-c", UNHEARD, "start", waits]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 128 + signal.SIGTERM
    assert done.stdout == ("left\n" if waits == "python" else "")
    assert "Traceback" not in done.stderr


def test_a_second_signal_ends_a_process_that_waits_in_machine_code() -> None:
    command = [sys.executable, "-c", UNHEARD, "steps", "machine code"]
    assert subprocess.run(command, check=False, timeout=300).returncode == 128 + signal.SIGTERM


def test_signals_to_a_child_are_its_own() -> None:
    """A child that is forked and ended does not end the start that forked it."""
    program = (
        "import os, signal, time; from moe_trm.runtime import interruption as module; module.UNWIND_S = 0.0;"
        "module.Interruption().install(); read, write = os.pipe(); child = os.fork();"
        # A signal just before a sleep does not shorten it.
        "child or (os.write(write, b'.'), [time.sleep(0.1) for _ in range(6000)]); os.read(read, 1);"
        "os.kill(child, signal.SIGTERM); os.waitpid(child, 0); time.sleep(1); print('alive')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=300)
    assert done.stdout == "alive\n"


def test_the_same_signal_from_terminal_and_launcher_is_one(interruption: Interruption) -> None:
    for _ in range(3):
        os.kill(os.getpid(), signal.SIGINT)
    assert interruption.requested == "SIGINT"


def test_a_second_signal_ends_the_process() -> None:
    program = (
        f"{HURRIED}interruption.install(); interruption.begin_steps(); os.kill(os.getpid(), signal.SIGTERM); "
        f"time.sleep({2 * ECHO_S}); os.kill(os.getpid(), signal.SIGTERM); print('alive')"
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
