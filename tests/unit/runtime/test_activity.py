"""Processes that are at work and processes that are not, as the system counts them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

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


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this kernel does not count waiting")
def test_waiting_for_a_processor_counts_as_computing_does() -> None:
    """Two that compute share one processor: together they have half of what they want, and wait for the rest."""
    core = {min(os.sched_getaffinity(0))}
    program = f"import os; os.sched_setaffinity(0, {core}); print('begun', flush=True)\nwhile True: pass"
    children = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) for _ in range(2)]
    try:
        for child in children:
            assert child.stdout is not None
            child.stdout.readline()
        deadline, share = time.monotonic() + PATIENCE_S, 0.0
        while share < 0.8:
            assert time.monotonic() < deadline
            before, begun = [activity_of(child.pid) for child in children], time.monotonic()
            time.sleep(0.4)
            seconds = [activity_of(child.pid).seconds for child in children]
            share = sum(seconds) - sum(each.seconds for each in before)
            share /= 2 * (time.monotonic() - begun)
    finally:
        for child in children:
            child.kill()
            child.communicate()


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
