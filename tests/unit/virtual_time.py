"""An event loop whose clock jumps to the next thing that happens, and that notices when nothing will."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Deadlock(AssertionError):
    """Everybody waits, and nothing is scheduled that could wake anybody."""


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Sleeps take no time."""

    _now = 0.0

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        if not self._ready:  # type: ignore[attr-defined]
            scheduled = [handle for handle in self._scheduled if not handle.cancelled()]  # type: ignore[attr-defined]
            if not scheduled:
                raise Deadlock
            self._now = max(self._now, min(handle.when() for handle in scheduled))
        super()._run_once()  # type: ignore[misc]


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end in virtual time."""
    loop = VirtualTimeLoop()
    try:
        return loop.run_until_complete(work)
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop._ready.clear()  # type: ignore[attr-defined]
        loop.close()
