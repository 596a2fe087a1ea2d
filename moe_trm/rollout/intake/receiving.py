"""Bodies of answers taken in a few at a time, so that those of thousands of requests do not fill the memory.

The others wait where they are: in the sockets, and behind these in the engines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import aiohttp
import orjson

from moe_trm.rollout.sglang.http import EngineHttp

ROOM_BYTES = 64 << 20
"""Bodies that a process holds at once, added up; a larger one is taken in alone."""


class Room:
    """Bytes for bodies that are being received and read. Whoever came first enters first."""

    def __init__(self, size: int = ROOM_BYTES) -> None:
        self.size, self._door, self._left = size, asyncio.Lock(), asyncio.Event()
        self.taken = self.most_taken = 0

    async def enter(self, size: int) -> None:
        """Return when there is room for `size` bytes, or nobody else in it."""
        async with self._door:
            while self.taken and self.taken + size > self.size:
                self._left.clear()
                await self._left.wait()
            self.taken += size
            self.most_taken = max(self.most_taken, self.taken)

    def leave(self, size: int) -> None:
        """Give the room of `enter` back."""
        self.taken -= size
        self._left.set()


class Reception(EngineHttp):
    """One request whose answer's body waits for room. The room is held until `leave`.

    Args:
        url: of the server.
        session: of the process, with the key.
        room: of the process.
        timeout_s, max_attempts: as in `EngineHttp`; the wait for room does not count.
    """

    def __init__(
        self, url: str, session: aiohttp.ClientSession, room: Room, *, timeout_s: float, max_attempts: int
    ) -> None:
        super().__init__(url, None, timeout_s=timeout_s, max_attempts=max_attempts)
        self._session, self._room, self._held = session, room, 0

    def leave(self) -> None:
        """Give the room back: the body is gone."""
        if self._held:
            self._room.leave(self._held)
        self._held = 0

    async def _once(
        self, method: str, path: str, body: Mapping[str, object] | None, timeout_s: float
    ) -> tuple[int, bytes]:
        self.leave()
        assert self._session is not None
        data, now = orjson.dumps(body), asyncio.get_running_loop().time
        async with asyncio.timeout(timeout_s) as limit:
            async with self._session.request(method, self.url + path, data=data) as response:
                limit.reschedule(None)
                # A body of unknown size gets all the room.
                known = response.content_length
                size = self._room.size if known is None else known
                await self._room.enter(size)
                self._held = size
                limit.reschedule(now() + timeout_s)
                return response.status, await response.read()
