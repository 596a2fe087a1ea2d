"""Processes that end with their owner, also when it is killed: no server stays behind that holds memory and a port.

A killed process cannot clean anything up. `Lifeline` therefore gives this task to a watcher process. It waits at the
end of a pipe that only the owner holds open. The kernel closes the pipe however the owner ends. `end_with_parent` is
for processes that others start for us.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from contextlib import suppress

_PR_SET_PDEATHSIG = 1
_RELEASED = b"."


class Lifeline:
    """Kills a process group with SIGKILL as soon as this process is gone. Stopped processes go as well.

    Args:
        group: of the processes, which is the process id of one that was started with `start_new_session=True`.
    """

    def __init__(self, group: int) -> None:
        # Isolated and without site-packages, the watcher is up in milliseconds and small.
        self._watcher = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(group)],
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


def end_with_parent() -> None:
    """This process gets SIGKILL when the thread that started it ends. Linux only; elsewhere nothing happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _watch(group: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if sys.stdin.buffer.read(1) != _RELEASED:
        signal_group(group, signal.SIGKILL)


if __name__ == "__main__":
    _watch(int(sys.argv[1]))
