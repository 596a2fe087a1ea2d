"""A child for tests: a call returns its payload after a while."""

from __future__ import annotations

import asyncio
from typing import Any

from moe_trm.errors import ConfigError
from moe_trm.runtime.child_messages import Problem, problem
from moe_trm.runtime.child_service import Asker, serve


class Sleeping:
    """Returns nothing. If `deaf`: "first" when it is cancelled, and all else once "first" is under way."""

    ready = None

    def __init__(self, settings: Any) -> None:
        if "refuse" in settings:
            raise ConfigError(settings["refuse"])
        self._deaf = bool(settings.get("deaf"))
        self._first = asyncio.Event()

    def begin(self, loop: asyncio.AbstractEventLoop) -> None:
        """Nothing to do."""

    async def call(self, payload: Any, ask: Asker) -> Any:
        if not self._deaf:
            await asyncio.sleep(1000)
        if payload != "first":
            await self._first.wait()
            return payload
        try:
            self._first.set()
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            pass
        return payload

    def problem(self, error: BaseException) -> Problem:
        return problem("error", str(error))

    def refusal(self, kind: str, text: str) -> Exception:
        return RuntimeError(text)


if __name__ == "__main__":
    serve(Sleeping)
