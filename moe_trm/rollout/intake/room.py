"""Room for bodies of answers, so that those of thousands of requests do not fill the memory."""

from __future__ import annotations

import asyncio

ROOM_BYTES = 64 << 20
"""Bodies of answers that a process holds at once, added up; a larger one is taken in alone."""


class Room:
    """Memory for bodies that are being received and read. The first to come is the first to enter.

    Bodies beyond it wait in the sockets, and behind these in the engines.
    """

    def __init__(self, size: int = ROOM_BYTES) -> None:
        self.size, self._door, self._left = size, asyncio.Lock(), asyncio.Event()
        self.taken = self.most_taken = 0

    async def enter(self, size: int) -> None:
        """Return when there is room for `size` bytes, or it is empty."""
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


class Visit:
    """A context manager around one request: what it takes of a room is given back at its end, or at a new attempt."""

    def __init__(self, room: Room) -> None:
        self._room, self._held = room, 0

    async def enter(self, size: int | None) -> None:
        """Wait for room for a body; one of unknown size gets all of it."""
        self._leave()
        wanted = self._room.size if size is None else size
        await self._room.enter(wanted)
        self._held = wanted

    async def __aenter__(self) -> Visit:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._leave()

    def _leave(self) -> None:
        if self._held:
            self._room.leave(self._held)
        self._held = 0
