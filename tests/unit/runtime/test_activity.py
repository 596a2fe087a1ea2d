"""Processes that are at work and processes that are not, as the system counts them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from moe_trm.runtime.activity import Activity, activity_of

PATIENCE_S = 20.0


def busy_for(process: int, seconds: float) -> bool:
    before, begun = activity_of(process), time.monotonic()
    time.sleep(seconds)
    return activity_of(process).busy_since(before, time.monotonic() - begun)


def until(process: int, *, busy: bool) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while busy_for(process, 0.2) is not busy:
        assert time.monotonic() < deadline


def test_a_process_that_computes_is_busy_until_it_is_stopped() -> None:
    """It has a thread that sleeps, too."""
    program = "import threading, time; threading.Thread(target=time.sleep, args=(60,)).start()\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", program]) as process:
        try:
            until(process.pid, busy=True)
            process.send_signal(signal.SIGSTOP)
            until(process.pid, busy=False)
            process.send_signal(signal.SIGCONT)
            until(process.pid, busy=True)
        finally:
            process.kill()


def test_a_process_that_waits_for_something_is_not_busy() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            until(process.pid, busy=False)
        finally:
            process.kill()


def test_little_work_and_pages_from_disk() -> None:
    before = Activity(seconds=5.0, page_reads=7)
    assert not Activity(5.0, 7).busy_since(before, 10.0)
    assert not Activity(5.1, 7).busy_since(before, 10.0)
    assert Activity(5.3, 7).busy_since(before, 10.0)
    assert Activity(5.0, 8).busy_since(before, 10.0)


def test_there_are_no_counts_of_a_process_that_is_gone() -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    with pytest.raises(OSError, match="No such"):
        activity_of(process.pid)
    assert activity_of(os.getpid()).seconds > 0
