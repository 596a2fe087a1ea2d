"""The start of a rollout server beside that of the learner, which waits for it (`rollout.server.wait_s`)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Protocol


class Running(Protocol):
    """A running server; leaving it ends it."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...


class ServerStart:
    """A server that starts in a thread. A context manager: leaving it ends the server, or its start.

    Args:
        start: returns once the server is ready, or raises; it gives up when the event that it is given is set.

    Attributes:
        over: set once the server is ready or has failed.

    Raises on leaving what `start` raised, unless it was given up.
    """

    def __init__(self, start: Callable[[threading.Event], Running]) -> None:
        self._start, self._given_up, self.over = start, threading.Event(), threading.Event()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="server-start")
        self._started: Future[Running] = Future()

    @property
    def failed(self) -> bool:
        """True when there will be no server."""
        return self._started.done() and self._started.exception() is not None

    def __enter__(self) -> ServerStart:
        self._started = self._pool.submit(self._start, self._given_up)
        self._started.add_done_callback(lambda _: self.over.set())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        failed = self.failed
        self._given_up.set()
        self._pool.shutdown()
        if not self.failed:
            self._started.result().__exit__(kind, error, trace)
        elif failed and kind is None:
            self._started.result()
