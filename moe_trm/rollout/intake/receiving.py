"""Bodies of answers taken in a few at a time, so that those of thousands of requests do not fill the memory.

The others wait where they are: in the sockets, and behind these in the engines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import numpy as np
import orjson

from moe_trm.rollout.intake.exchange import Exchange
from moe_trm.rollout.servers.http import EngineHttp

ROOM_BYTES = 64 << 20
"""Bodies that a process holds at once, added up; a larger one is taken in alone."""


class Room:
    """Memory for bodies that are being received and read. Whoever came first enters first."""

    def __init__(self, size: int = ROOM_BYTES) -> None:
        self.size, self._door, self._left = size, asyncio.Lock(), asyncio.Event()
        self.taken = self.most_taken = 0
        self._spare = np.empty(0, np.uint8)

    async def enter(self, size: int) -> None:
        """Return when there is room for `size` bytes, or nobody else in it."""
        async with self._door:
            while self.taken and self.taken + size > self.size:
                self._left.clear()
                await self._left.wait()
            self.taken += size
            self.most_taken = max(self.most_taken, self.taken)

    def leave(self, size: int, memory: np.ndarray | None = None) -> None:
        """Give the room of `enter` back, and memory that nobody reads any more."""
        self.taken -= size
        if memory is not None and len(memory) > len(self._spare):
            self._spare = memory
        self._left.set()

    def memory(self, size: int) -> np.ndarray:
        """At least `size` bytes: those given back last, if they are enough. New ones cost as much as a copy."""
        if len(self._spare) < size:
            return np.empty(size, np.uint8)
        memory, self._spare = self._spare, np.empty(0, np.uint8)
        return memory


class Reception(EngineHttp):
    """One request whose answer's body waits for room. The room is held until `leave`, and the body valid until then.

    Args:
        url: of the server.
        headers: of every request, such as the key.
        room: of the process.
        timeout_s, max_attempts: as in `EngineHttp`; the wait for room does not count.
    """

    def __init__(
        self, url: str, headers: Mapping[str, str], room: Room, *, timeout_s: float, max_attempts: int
    ) -> None:
        super().__init__(url, None, timeout_s=timeout_s, max_attempts=max_attempts)
        self._sent, self._room, self._held = headers, room, 0
        self._memory: np.ndarray | None = None

    def leave(self) -> None:
        """Give the room back: nobody reads the body any more."""
        if self._held or self._memory is not None:
            self._room.leave(self._held, self._memory)
        self._held, self._memory = 0, None

    async def answer(self, path: str, body: Mapping[str, object]) -> memoryview:
        """The body of a successful answer to a POST; raises as `request` does."""
        await self.request("POST", path, body)
        return self._body

    async def _once(
        self, method: str, path: str, body: Mapping[str, object] | None, timeout_s: float
    ) -> tuple[int, bytes]:
        self.leave()
        now, exchange = asyncio.get_running_loop().time, Exchange(self.url + path)
        try:
            async with asyncio.timeout(timeout_s) as limit:
                head = await exchange.ask(method, self._sent, orjson.dumps(body))
                limit.reschedule(None)
                # A body of unknown size gets all the room.
                size = self._room.size if head.length is None else head.length
                await self._room.enter(size)
                self._held = size
                limit.reschedule(now() + timeout_s)
                self._body = (await exchange.body(head, self._target)).toreadonly()
                return head.status, b"" if head.status < 400 else bytes(self._body)
        finally:
            exchange.close()

    def _target(self, size: int) -> memoryview:
        self._memory = self._room.memory(size)
        return self._memory[:size].data
