"""A command in a process group of its own, which ends with the process that started it."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import IO

from moe_trm.runtime.lifeline import Lifeline, signal_group

POLL_S = 0.05


class OwnedProcess:
    """A command that leads a session and a process group. A context manager: leaving it kills what still runs.

    The terminal's Ctrl-C does not reach it. When this process is gone, even by SIGKILL, the group is ended too.

    Args:
        command: its words.
        environment: all of it; None: this process's.
        input, output, errors: descriptors or files, `subprocess.PIPE`, `subprocess.DEVNULL`; None: this process's.
        grace_s: time from SIGTERM to SIGKILL for the group when this process is gone; 0: no SIGTERM.
        mark: `NAME=VALUE` in the environment of the group and of no other process. What the group started outside
            itself is killed by it when this process is gone.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        *,
        input: int | None = None,
        output: int | IO[bytes] | None = None,
        errors: int | IO[bytes] | None = None,
        grace_s: float = 0.0,
        mark: str = "",
    ) -> None:
        self._process = subprocess.Popen(
            command, env=environment, stdin=input, stdout=output, stderr=errors, start_new_session=True
        )
        self._lifeline = Lifeline(self._process.pid, grace_s=grace_s, mark=mark)

    @property
    def pid(self) -> int:
        """Process id, also of its session and its group."""
        return self._process.pid

    @property
    def input(self) -> IO[bytes]:
        """Its input, where `input` was `subprocess.PIPE`."""
        assert self._process.stdin is not None
        return self._process.stdin

    @property
    def output(self) -> IO[bytes]:
        """Its output, where `output` was `subprocess.PIPE`."""
        assert self._process.stdout is not None
        return self._process.stdout

    def poll(self) -> int | None:
        """Exit status, negative for a signal that ended it; None while it runs."""
        return self._process.poll()

    def wait(self, timeout: float | None = None) -> int:
        """The exit status, after the end. Raises `subprocess.TimeoutExpired`."""
        return self._process.wait(timeout)

    def send_signal(self, number: int) -> None:
        """Send a signal to it, unless it has ended."""
        self._process.send_signal(number)

    def terminate(self) -> None:
        """Send it SIGTERM, unless it has ended."""
        self._process.terminate()

    def group_ends_within(self, timeout_s: float) -> bool:
        """Wait for the end of every process of the group; False where some are still there."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self._process.poll()
            if not signal_group(self.pid, 0):
                return True
            time.sleep(POLL_S)
        return False

    def kill(self) -> None:
        """Kill its process group, and wait for its end."""
        if self.poll() is None:
            signal_group(self.pid, signal.SIGKILL)
            self._process.wait()

    def release(self) -> None:
        """The group has ended: nothing is killed any more when this process is gone. Safe to call twice."""
        self._lifeline.release()

    def __enter__(self) -> OwnedProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        self.release()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
