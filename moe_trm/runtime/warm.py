"""Programs without their imports: forks of a process that has done them (`moe_trm.runtime.fork_server`)."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import msgspec

from moe_trm.errors import RunError
from moe_trm.runtime.fork_server import Asked, Began, Ended, Told

_CHUNK = 1 << 16
END_S = 10.0
"""Time in which the process ends once its owner wants it."""


class WarmServer:
    """A process that does imports once and then forks programs. A context manager: leaving it ends all of them.

    The process ends with this one, also when this one is killed.

    Args:
        module: `python -m MODULE DESCRIPTOR` does the imports, then `fork_server.serve` on the listening socket
            `DESCRIPTOR` until its standard input ends.
        arguments: further ones of the module.
        environment: beside that of this process.
        log: where its own output goes, of all its lives; None: this process's.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        log: Path | None = None,
    ) -> None:
        self._module, self._arguments, self._log = module, list(arguments), log
        self._environment = {**os.environ, **(environment or {})}
        self._folder = tempfile.TemporaryDirectory(prefix="moe-trm-warm-")  # mode 0700: only this user reaches it
        self._process: subprocess.Popen[bytes] | None = None

    def address(self) -> str:
        """Path of the socket of a living process: the one there is, or a new one where that has died.

        A new one has not done its imports yet, and its clients wait for it.
        """
        path = Path(self._folder.name) / "socket"
        if self._process is None or self._process.poll() is not None:
            if self._process is not None:
                self._process.communicate()
            path.unlink(missing_ok=True)
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(path))
                listener.listen()
                self._process = self._start(listener.fileno())
        return str(path)

    def _start(self, descriptor: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", self._module, str(descriptor), *self._arguments]
        log = None if self._log is None else self._log.open("ab")
        try:
            return subprocess.Popen(
                command,
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=(descriptor,),
                start_new_session=True,
            )
        finally:
            if log is not None:
                log.close()

    @property
    def runs(self) -> bool:
        """True while there is a process, which has done its imports or is about to."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        """Of the process; None before `address` was asked for."""
        return None if self._process is None else self._process.pid

    def close(self) -> None:
        """End it and what it forked. Safe to call twice."""
        if self._process is not None:
            try:
                self._process.communicate(timeout=END_S)  # closes its input and waits
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.communicate()
        self._folder.cleanup()

    def __enter__(self) -> WarmServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class WarmProcess:
    """`python PROGRAM...` in a fork of a warm process, used as a `subprocess.Popen` in a session of its own.

    It has this process's standard input, output and errors unless others are given. It is killed when this object is
    closed, when this process ends, and when the warm process ends.

    Args:
        address: of `WarmServer`.
        program: `-m`, a module and its arguments, or a script and its arguments.
        environment: all of it; None: this process's.
        descriptors: of input, output and errors.
    Attributes:
        pid: process id.
        returncode: exit status, negative for a signal; None while it runs.
    Raises:
        RunError: the warm process is gone, or cannot fork.
    """

    def __init__(
        self,
        address: str,
        program: Sequence[str],
        environment: Mapping[str, str] | None = None,
        descriptors: tuple[int, int, int] = (0, 1, 2),
    ) -> None:
        self.args, self.returncode = list(program), None
        self._heard, self._turn = b"", threading.Lock()
        self._connection = socket.socket(socket.AF_UNIX)
        asked = Asked(list(program), dict(os.environ if environment is None else environment), os.getcwd())
        began = None
        try:
            self._connection.connect(address)
            line = msgspec.json.encode(asked) + b"\n"
            sent = socket.send_fds(self._connection, [line], descriptors)
            self._connection.sendall(line[sent:])
            said = self._next_line(None)
            began = msgspec.json.decode(said, type=Began) if said else Began(0, "it has ended")
        except OSError as error:
            began = Began(0, str(error))
        finally:
            if began is None or not began.pid:
                self._connection.close()
        if not began.pid:
            raise RunError(
                "the process that forks warm ranks started none",
                where=address,
                got=began.error,
                expected="a fork",
                fix="Start the command again. If this stays so, leave warm_ranks out.",
            )
        self.pid = began.pid

    returncode: int | None

    def poll(self) -> int | None:
        """The exit status; None while it runs."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit status, after the end. Threads that wait take turns. Raises `subprocess.TimeoutExpired`."""
        with self._turn:
            if self.returncode is None:
                line = self._next_line(timeout)
                # Without a status the warm process is gone, and takes its forks with it.
                self.returncode = msgspec.json.decode(line, type=Ended).status if line else -signal.SIGKILL
                self._connection.close()
            return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal to it, unless it has ended."""
        self._tell(Told(number))

    def terminate(self) -> None:
        """Send it SIGTERM, unless it has ended."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill it and all of its process group, and wait for its end. Safe to call twice."""
        self._tell(Told(signal.SIGKILL, group=True))
        self.wait()

    def __enter__(self) -> WarmProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def _tell(self, told: Told) -> None:
        if self.returncode is None:
            with suppress(OSError):  # it has ended, as the next look will tell
                self._connection.sendall(msgspec.json.encode(told) + b"\n")

    def _next_line(self, timeout: float | None) -> bytes:
        """The next line; empty where the other side is gone. Raises `subprocess.TimeoutExpired`."""
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        deadline = None if timeout is None else time.monotonic() + timeout
        while b"\n" not in self._heard:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not poll.poll(None if left is None else 1000 * left):
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            try:
                data = self._connection.recv(_CHUNK)
            except ConnectionError:
                data = b""
            if not data:
                return b""
            self._heard += data
        line, _, self._heard = self._heard.partition(b"\n")
        return line
