"""A link to a server that can be cut: every connection through it is reset, as by a router that forgot them."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

NO_FAREWELL = struct.pack("ii", 1, 0)
"""SO_LINGER of 0 seconds: closing sends a reset."""


class Link:
    """Passes bytes between clients and the server at `url`.

    Attributes:
        url: the address for clients.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname, parts.port
        self._ends: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        listening = asyncio.start_server(self._pass_on, "127.0.0.1", 0)
        self._server = asyncio.run_coroutine_threadsafe(listening, self._loop).result()
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def cut(self) -> int:
        """Reset all connections; their number. New ones are passed on."""
        return asyncio.run_coroutine_threadsafe(self._cut(), self._loop).result()

    def close(self) -> None:
        """Take no more connections."""
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends = {writer}
        self._ends |= ends
        try:
            with suppress(OSError):
                answers, upstream = await asyncio.open_connection(self._host, self._port)
                ends.add(upstream)
                self._ends |= ends
                await asyncio.gather(_copy(reader, upstream), _copy(answers, writer))
        finally:
            self._ends -= ends
            for end in ends:
                end.transport.abort()

    async def _cut(self) -> int:
        ends = [end for end in self._ends if not end.transport.is_closing()]
        for end in ends:
            end.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_FAREWELL)
            end.transport.abort()
        return len(ends) // 2

    async def _close(self) -> None:
        self._server.close()
        await self._cut()
        while self._ends:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Until either end closes; the other is closed then."""
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    finally:
        writer.close()


@contextmanager
def link_to(url: str) -> Iterator[Link]:
    """A link, inside the `with`."""
    link = Link(url)
    try:
        yield link
    finally:
        link.close()
