"""A child process of a job, which never outlives it."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import IO

from moe_trm.runtime.lifeline import Lifeline, signal_group


class Child:
    """A command in a session of its own. A context manager: leaving it kills what still runs.

    The terminal's Ctrl-C does not reach it. When this process is killed, the command's process group is killed too.

    Args:
        command: its words.
        environment: all of it.
        output, errors: descriptors, or `subprocess.PIPE` for the output; None: this process's.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        output: int | None = None,
        errors: int | None = None,
    ) -> None:
        self._process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=errors, start_new_session=True, bufsize=0
        )
        self._lifeline = Lifeline(self._process.pid)

    @property
    def pid(self) -> int:
        """Process id, also of its session and its group."""
        return self._process.pid

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

    def kill(self) -> None:
        """Kill its process group, and wait for its end."""
        if self.poll() is None:
            signal_group(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        self._lifeline.release()
        if self._process.stdout is not None:
            self._process.stdout.close()
