"""Processes that end with their owner, also when it is killed: no server stays behind that holds memory and a port.

A killed process cannot clean anything up. `Lifeline` therefore gives this task to a watcher process. It waits at the
end of a pipe that only the owner holds open. The kernel closes the pipe however the owner ends. So a process has a
lifeline from its first instruction on. `end_with_parent` is for processes that others start for us.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_RELEASED = b"."
_POLL_S = 0.05


class Lifeline:
    """Ends a process group as soon as this process is gone, by SIGKILL in the end. Stopped processes go as well.

    Args:
        group: process id of a process that was started with `start_new_session=True`.
        grace_s: time from SIGTERM to SIGKILL, for a process that has something to clean up; 0: no SIGTERM.
        mark: `NAME=VALUE` in the environment of the group and of no other process. What it started in other groups is
            killed by it.
    """

    def __init__(self, group: int, *, grace_s: float = 0.0, mark: str = "") -> None:
        # Isolated and without site-packages, the watcher is up in milliseconds and small.
        self._watcher = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(group), str(grace_s), mark],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def release(self) -> None:
        """The group has ended: nothing is killed any more. Safe to call twice."""
        pipe = self._watcher.stdin
        assert pipe is not None
        with suppress(BrokenPipeError, ValueError):  # the watcher is gone; it was released before
            pipe.write(_RELEASED)
            pipe.close()
        self._watcher.wait()


def signal_group(group: int, number: int) -> bool:
    """Send a signal to a process group (0: none, just look); False where it has no process left that takes one."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def members(group: int) -> list[int]:
    """Processes of a group, where the system tells (Linux)."""
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(ProcessLookupError, PermissionError):
            if os.getpgid(int(folder.name)) == group:
                pids.append(int(folder.name))
    return pids


def marked(mark: str) -> list[int]:
    """Processes with `mark` (`NAME=VALUE`) in their environment, where the system tells (Linux)."""
    needle, pids = b"\0" + os.fsencode(mark) + b"\0", []
    for folder in Path("/proc").glob("[0-9]*"):
        # Processes of others, and those that have just ended, tell nothing.
        with suppress(OSError):
            if needle in b"\0" + (folder / "environ").read_bytes():
                pids.append(int(folder.name))
    return pids


def kill_marked(mark: str) -> None:
    """End every process with `mark` at once."""
    for stray in marked(mark):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(stray, signal.SIGKILL)


def end_with_parent() -> None:
    """This process gets SIGKILL when the thread that started it ends. Linux only; elsewhere nothing happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _watch(group: int, grace_s: float, mark: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if sys.stdin.buffer.read(1) == _RELEASED:
        return
    until = time.monotonic() + grace_s
    if grace_s and signal_group(group, signal.SIGTERM):
        while signal_group(group, 0) and time.monotonic() < until:
            time.sleep(_POLL_S)
    signal_group(group, signal.SIGKILL)
    if mark:
        kill_marked(mark)
        time.sleep(_POLL_S)  # a process that was just starting a program showed no environment
        kill_marked(mark)


if __name__ == "__main__":
    _watch(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3])
