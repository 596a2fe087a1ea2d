"""The wait for a server that somebody else started, and that may still be loading.

Whatever keeps it from answering passes by itself: its name is not known yet, it takes no connection, a proxy answers
for it, or it says that it loads. What it refuses (a key, an address) it would refuse again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from moe_trm.errors import EngineLost
from moe_trm.types import ServerState

ANSWER_S = 30.0
"""Longest time for one answer of a server that is there: SGLang's own health check gives up after 20 s."""
POLL_S = 0.5
"""Pause between two questions."""
REPORT_S = 30.0
"""Pause between two lines of the log."""

log = logging.getLogger(__name__)
T = TypeVar("T")


class Arrival:
    """The wait for the first answer of the server at `url`, which may take `limit_s` seconds to load."""

    def __init__(self, url: str, limit_s: float) -> None:
        self._url, self._limit_s = url, limit_s
        self._waits_since: float | None = None

    @property
    def state(self) -> ServerState:
        """Figures of a wait that is on; before and after it, of a server in service."""
        if self._waits_since is None:
            return ServerState(self._url)
        return ServerState(self._url, awaited_s=time.monotonic() - self._waits_since, limit_s=self._limit_s)

    async def of(self, ask: Callable[[], Awaitable[T]]) -> T:
        """The first answer to `ask`. Raises `EngineLost` after `limit_s`, and at once what else `ask` raises."""
        wait_began = reported = time.monotonic()
        while True:
            try:
                answer = await ask()
            except EngineLost as error:
                waited_s = time.monotonic() - wait_began
                if waited_s > self._limit_s:
                    raise self._too_late(error) from error
                if self._waits_since is None or time.monotonic() - reported > REPORT_S:
                    reported = time.monotonic()
                    log.warning("waiting for %s: %.0f s of at most %.0f s", self._url, waited_s, self._limit_s)
                self._waits_since = wait_began
            else:
                self._waits_since = None
                return answer
            await asyncio.sleep(POLL_S)

    def _too_late(self, error: EngineLost) -> EngineLost:
        return EngineLost(
            error.what,
            where=error.where,
            got=f"{error.got}, for {self._limit_s:g} s",
            expected="an answer within rollout.server.startup_timeout_s",
            fix=f"{error.fix} Raise rollout.server.startup_timeout_s if it only takes longer to load.".lstrip(),
        )
