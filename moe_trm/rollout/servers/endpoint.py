"""One address that samples are requested from, and its unanswered requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from moe_trm.errors import EngineLost
from moe_trm.rollout.servers.http import EngineHttp

T = TypeVar("T")
Post = Callable[[EngineHttp], Coroutine[Any, Any, T]]
"""Asks the server of a connection for one sample, and returns what became of it."""


class Endpoint:
    """Requests for samples through one connection. Servers behind a router share one.

    Attributes:
        http: the connection.
    """

    def __init__(self, http: EngineHttp) -> None:
        self.http = http
        self._asking: set[asyncio.Task[Any]] = set()
        self._answered_s = 0.0

    @property
    def in_flight(self) -> int:
        """Samples that were asked for here and not answered."""
        return len(self._asking)

    @property
    def silent_s(self) -> float:
        """Seconds since a sample was last answered, or the first one asked for; 0 while none is in flight."""
        return _clock() - self._answered_s if self._asking else 0.0

    async def ask(self, post: Post[T]) -> T:
        """The value that `post` returns.

        Raises `EngineLost` when it is given up meanwhile, and as `post` does.
        """
        task = asyncio.ensure_future(post(self.http))
        if not self._asking:
            self._answered_s = _clock()
        self._asking.add(task)
        try:
            answer = await asyncio.shield(task)
        except asyncio.CancelledError:
            this = asyncio.current_task()
            if not task.cancelled() or (this is not None and this.cancelling()):
                task.cancel()
                raise
            raise EngineLost("the rollout server was lost while it sampled", where=self.http.url) from None
        finally:
            self._asking.discard(task)
        self._answered_s = _clock()
        return answer

    async def wait(self, timeout_s: float | None = None) -> None:
        """Return when nothing that was asked for by now is in flight, or after `timeout_s`."""
        if self._asking:
            await asyncio.wait(self._asking, timeout=timeout_s)

    def give_up(self) -> None:
        """Callers that wait for an answer get `EngineLost`."""
        for task in self._asking:
            task.cancel()

    async def close(self) -> None:
        """Give up what is in flight and release the connection."""
        asking = [*self._asking]
        self.give_up()
        await asyncio.gather(*asking, return_exceptions=True)
        await self.http.close()


def _clock() -> float:
    return asyncio.get_running_loop().time()
