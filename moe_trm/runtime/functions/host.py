"""A user's function in another process: calls that raise, hang, crash or return nonsense fail alone; the run goes on.

A hanging call is found by its deadline and by the shared cell of the current call, which says whose code runs, and
since when. Its process is ended. Other calls of that process are repeated in a new one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from moe_trm.runtime.child import Answerer, ChildEnded
from moe_trm.runtime.functions.hosted import FunctionSettings, FunctionTraits
from moe_trm.runtime.functions.process import FunctionFailed, Process


class FunctionHost:
    """One process that runs one function; started by the first call, and again after one that had to be ended.

    `adapter` names the function that makes a `Hosted` of it, `key` where its own name stands in the configuration. A
    call takes at most `limit_s`.
    """

    def __init__(self, function: str, *, adapter: str, key: str, limit_s: float) -> None:
        self._settings = FunctionSettings(function, adapter, key, limit_s)
        self._process: Process | None = None
        self._starting: asyncio.Task[Process] | None = None
        self._closed = False

    async def start(self) -> FunctionTraits:
        """Load the function. Raises `ConfigError` when that fails."""
        return (await self._running()).traits

    @property
    def place(self) -> str:
        """File and line of the function; its name before it was loaded."""
        return self._process.traits.place if self._process is not None else self._settings.function

    async def call(self, payload: Any, answers: Callable[[], Answerer] | None = None) -> Any:
        """Call the function with plain data and return its value. One call at a time, unless the function is
        `concurrent`.

        `answers` makes the answerer of this call, a new one whenever the call is repeated. Raises `FunctionFailed`, and
        whatever the answerer raised but `Refused`.
        """
        while True:
            process = await self._running()
            try:
                return await process.call(payload, answers() if answers else None)
            except ChildEnded:
                # Every ended process has failed at least one call for good, so this comes to an end.
                continue

    async def close(self) -> None:
        """End the process and its calls."""
        self._closed = True
        if self._starting is not None:
            await asyncio.gather(self._starting, return_exceptions=True)
        if self._process is not None:
            await self._process.close()

    async def _running(self) -> Process:
        """The process, started where there is none.

        Starting one cannot be cancelled half-way, or it would never be ended.
        """
        if self._closed:
            raise FunctionFailed("crash", "the run is over")
        if self._process is not None and not self._process.ended:
            return self._process
        if self._starting is None or self._starting.done():
            self._starting = asyncio.create_task(self._restart())
        return await asyncio.shield(self._starting)

    async def _restart(self) -> Process:
        if self._process is not None:
            await self._process.close()
        self._process = await Process.start(self._settings)
        return self._process
