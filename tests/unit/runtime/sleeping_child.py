"""A child for tests: a call returns its payload after a while."""

from __future__ import annotations

import asyncio
from typing import Any

from moe_trm.errors import ConfigError
from moe_trm.runtime.child_messages import Problem, problem
from moe_trm.runtime.child_service import Asker, serve


class Sleeping:
    """Returns what comes first last, even where it is cancelled, if `deaf`; else nothing."""

    ready = None

    def __init__(self, settings: Any) -> None:
        if "refuse" in settings:
            raise ConfigError(settings["refuse"])
        self._deaf = bool(settings.get("deaf"))

    def begin(self, loop: asyncio.AbstractEventLoop) -> None:
        """Nothing to do."""

    async def call(self, payload: Any, ask: Asker) -> Any:
        if not self._deaf:
            await asyncio.sleep(1000)
        if payload == "first":
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                return payload
        return payload

    def problem(self, error: BaseException) -> Problem:
        return problem("error", str(error))

    def refusal(self, kind: str, text: str) -> Exception:
        return RuntimeError(text)


if __name__ == "__main__":
    serve(Sleeping)
