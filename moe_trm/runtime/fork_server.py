"""The process that forks programs for others on this machine: with its imports done, they begin within milliseconds.

Programs are asked for over a socket file that only this user reaches (`moe_trm.runtime.warm` makes it, and is the other
side). A connection is one program. The client sends one line of JSON with its descriptors for input, output and
errors, and later a line for each signal. It gets the process id, and later the exit status. A program whose client is
gone is killed with its process group. When the owner of this process is gone, so are all programs.
"""

from __future__ import annotations

import gc
import os
import selectors
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

import msgspec

from moe_trm.errors import RunError
from moe_trm.runtime.forks import check_one_thread, fork, run_program

POLL_S = 0.02
"""Pause between two looks at running programs."""
REQUEST_S = 30.0
"""Limit for the rest of a request that has begun to arrive."""
_CHUNK = 1 << 16
NUM_DESCRIPTORS = 3


class Asked(msgspec.Struct, frozen=True):
    """The program of a connection: `python PROGRAM...` in `folder`, with exactly this environment."""

    program: list[str]
    environment: dict[str, str]
    folder: str


class Told(msgspec.Struct, frozen=True):
    """A signal for the program, or for all of its process group."""

    number: int
    group: bool = False


class Began(msgspec.Struct, frozen=True):
    """Process id of the program; 0 where it could not be started, and why."""

    pid: int
    error: str = ""


class Ended(msgspec.Struct, frozen=True):
    """Exit status of the program, negative for a signal that ended it."""

    status: int


@dataclass
class _Running:
    """A program and its client."""

    pid: int
    client: socket.socket
    heard: bytes = b""
    """The beginning of a line."""


def live(descriptor: int) -> NoReturn:
    """The rest of the life of a process that has done its imports: `serve` until its standard input ends.

    It ends without the teardown of all that it imported, which takes a second. `descriptor`: of the listening socket.
    Raises `RunError` where this process has several threads.
    """
    # Collections in a fork would otherwise write to, and so copy, every page of what was imported.
    gc.collect()
    gc.freeze()
    check_one_thread()
    with socket.socket(fileno=descriptor) as listener:
        serve(listener, sys.stdin.fileno())
    os._exit(0)


def serve(listener: socket.socket, owner: int) -> None:
    """Fork what clients of `listener` ask for, until the other end of the descriptor `owner` is closed."""
    with selectors.DefaultSelector() as waiting:
        server = _ForkServer(listener, owner, waiting)
        try:
            server.run()
        finally:
            server.kill_all()


class _ForkServer:
    def __init__(self, listener: socket.socket, owner: int, waiting: selectors.BaseSelector) -> None:
        self._listener, self._owner, self._waiting = listener, owner, waiting
        self._running: dict[int, _Running] = {}
        waiting.register(listener, selectors.EVENT_READ)
        waiting.register(owner, selectors.EVENT_READ)

    def run(self) -> None:
        while True:
            for key, _ in self._waiting.select(POLL_S if self._running else None):
                if key.fileobj == self._owner:
                    if not os.read(self._owner, _CHUNK):
                        return
                elif key.fileobj is self._listener:
                    self._begin()
                else:
                    self._hear(key.data)
            for running in self._ended():
                self._forget(running)

    def kill_all(self) -> None:
        for running in list(self._running.values()):
            self._kill(running)

    def _begin(self) -> None:
        try:
            client, _ = self._listener.accept()
        except OSError:  # it went while it waited
            return
        client.settimeout(REQUEST_S)
        descriptors: list[int] = []
        try:
            data, descriptors, _, _ = socket.recv_fds(client, _CHUNK, NUM_DESCRIPTORS)
            while not data.endswith(b"\n"):
                more = client.recv(_CHUNK)
                if not more:
                    raise ConnectionError("the client is gone")
                data += more
            asked = msgspec.json.decode(data, type=Asked)
            if len(descriptors) != NUM_DESCRIPTORS:
                raise ConnectionError(f"{len(descriptors)} descriptors instead of {NUM_DESCRIPTORS}")
            pid = fork(partial(self._become, client, descriptors, asked))
        except (OSError, msgspec.DecodeError, RunError) as error:
            with client, suppress(OSError):
                client.sendall(msgspec.json.encode(Began(0, str(error))) + b"\n")
            return
        finally:
            for each in descriptors:
                os.close(each)
        running = self._running[pid] = _Running(pid, client)
        self._waiting.register(client, selectors.EVENT_READ, running)
        self._tell(running, Began(pid))

    def _become(self, client: socket.socket, descriptors: list[int], asked: Asked) -> int:
        """In the fork: leave the server's sockets, take what was asked for, and run the program."""
        self._waiting.close()
        for each in (self._listener, client, *(running.client for running in self._running.values())):
            each.close()
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
        for descriptor in descriptors:
            os.close(descriptor)
        os.chdir(asked.folder)
        os.environ.clear()
        os.environ.update(asked.environment)
        return run_program(asked.program)

    def _hear(self, running: _Running) -> None:
        if self._running.get(running.pid) is not running:  # forgotten in this turn
            return
        try:
            data = running.client.recv(_CHUNK)
        except OSError:
            data = b""
        if not data:
            self._kill(running)
            return
        *lines, running.heard = (running.heard + data).split(b"\n")
        for line in lines:
            told = msgspec.json.decode(line, type=Told)
            self._signal(running, told.number, group=told.group)

    def _kill(self, running: _Running) -> None:
        self._signal(running, signal.SIGKILL, group=True)
        os.waitpid(running.pid, 0)
        self._forget(running)

    def _signal(self, running: _Running, number: int, *, group: bool) -> None:
        with suppress(ProcessLookupError):
            (os.killpg if group else os.kill)(running.pid, number)

    def _ended(self) -> Iterator[_Running]:
        """Those that have just ended; their clients know."""
        for running in list(self._running.values()):
            pid, status = os.waitpid(running.pid, os.WNOHANG)
            if pid:
                self._tell(running, Ended(os.waitstatus_to_exitcode(status)))
                yield running

    def _forget(self, running: _Running) -> None:
        del self._running[running.pid]
        self._waiting.unregister(running.client)
        running.client.close()

    def _tell(self, running: _Running, answer: Began | Ended) -> None:
        with suppress(OSError):  # the client is gone, as the next look will tell
            running.client.sendall(msgspec.json.encode(answer) + b"\n")
