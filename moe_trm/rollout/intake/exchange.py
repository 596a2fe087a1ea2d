"""One HTTP/1.1 request on a connection of its own, whose body is received straight into memory that the caller has.

A general client copies a body several times on its way: out of the socket, out of its parser, into one piece. Answers
with routes are tens of megabytes, so that is more work than reading them.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

import aiohttp

_MOST_HEAD = 1 << 16
_CHUNK = 1 << 11
"""Bytes read at once where the end is not known. Thousands of answers wait with so much of their bodies taken in."""
_WAKE_BYTES = 1 << 22
"""Bytes of a body that wake the process: a wake-up costs more than the copy of a few kilobytes."""


@dataclass(frozen=True)
class Head:
    """The beginning of an answer.

    Attributes:
        status: of HTTP.
        length: bytes of the body; None where the server does not say before it sends them.
        chunked: the body comes in chunks.
    """

    status: int
    length: int | None
    chunked: bool


class Exchange:
    """A context manager around one request and its answer. Closes the connection at its end.

    Every method raises `aiohttp.ClientError` where the connection fails, or the answer is no HTTP.

    Args:
        url: `http://host:port/path`.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.scheme == "http", "the caller has looked"
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._netloc, self._path = parts.netloc.rpartition("@")[2], parts.path or "/"
        self._socket: socket.socket | None = None
        self._rest, self._wakes_at = b"", 1

    async def ask(self, method: str, headers: Mapping[str, str], data: bytes) -> Head:
        """Send the request; returns when the head of its answer is there."""
        fields = {"Host": self._netloc, "Content-Length": str(len(data)), "Connection": "close", **headers}
        lines = [f"{method} {self._path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
        try:
            self._socket = await _connected(self._host, self._port)
            await _loop().sock_sendall(self._socket, "\r\n".join([*lines, "", ""]).encode("latin-1") + data)
            return _head(await self._until(b"\r\n\r\n", _MOST_HEAD))
        except OSError as error:
            raise aiohttp.ClientConnectionError(str(error)) from error

    async def body(self, head: Head, memory: Callable[[int], memoryview]) -> memoryview:
        """The body of an answer with `head`, in what `memory` gives for its size."""
        try:
            if head.length is not None:
                target = memory(head.length)
                await self._fill(target)
                return target
            whole = b"".join([part async for part in self._chunks()] if head.chunked else [await self._all()])
        except OSError as error:
            raise aiohttp.ClientConnectionError(str(error)) from error
        target = memory(len(whole))
        target[:] = whole
        return target

    def close(self) -> None:
        """End the connection."""
        if self._socket is not None:
            self._socket.close()

    async def _fill(self, target: memoryview) -> None:
        assert self._socket is not None
        done = min(len(self._rest), len(target))
        target[:done] = self._rest[:done]
        self._rest = self._rest[done:]
        while done < len(target):
            self._wake_at(min(len(target) - done, _WAKE_BYTES))
            received = await _loop().sock_recv_into(self._socket, target[done:])
            if not received:
                raise aiohttp.ClientPayloadError(f"the body ended after {done} of {len(target)} bytes")
            done += received
        self._wake_at(1)

    def _wake_at(self, size: int) -> None:
        """Sleep until so many bytes are there, the end of the connection, or all that the socket can hold."""
        assert self._socket is not None
        if size != self._wakes_at:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)
            self._wakes_at = size

    async def _chunks(self) -> AsyncIterator[bytes]:
        """The parts of a chunked body; trailers are not read."""
        while True:
            line = await self._until(b"\r\n", _MOST_HEAD)
            try:
                size = int(line.partition(b";")[0], 16)
            except ValueError as error:
                raise aiohttp.ClientPayloadError(f"no chunk: {line[:40]!r}") from error
            if size == 0:
                return
            part = bytearray(size + 2)
            await self._fill(memoryview(part))
            yield bytes(part[:-2])

    async def _all(self) -> bytes:
        """All bytes until the server closes the connection."""
        parts = [self._rest]
        assert self._socket is not None
        while part := await _loop().sock_recv(self._socket, _MOST_HEAD):
            parts.append(part)
        return b"".join(parts)

    async def _until(self, end: bytes, most: int) -> bytes:
        """All bytes before `end`, which is taken too."""
        assert self._socket is not None
        while (place := self._rest.find(end)) < 0:
            if len(self._rest) > most:
                raise aiohttp.ClientPayloadError("the head of an answer is too long")
            received = await _loop().sock_recv(self._socket, _CHUNK)
            if not received:
                raise aiohttp.ClientConnectionError("the server closed the connection")
            self._rest += received
        before, self._rest = self._rest[:place], self._rest[place + len(end) :]
        return before


def _head(text: bytes) -> Head:
    first, *lines = text.decode("latin-1").split("\r\n")
    version, _, status = first.partition(" ")
    fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    length, chunked = fields.get("content-length"), "chunked" in fields.get("transfer-encoding", "").lower()
    if not version.startswith("HTTP/1.") or not status[:3].isdecimal() or not (length or "0").isdecimal():
        raise aiohttp.ClientPayloadError(f"no HTTP answer: {first[:40]!r}")
    if "content-encoding" in fields:
        raise aiohttp.ClientPayloadError(f"the body is encoded: {fields['content-encoding']}")
    return Head(int(status[:3]), None if length is None or chunked else int(length), chunked)


async def _connected(host: str, port: int) -> socket.socket:
    """A connection to the first address of `host` that accepts one. Raises `OSError`."""
    failure: OSError | None = None
    for family, kind, protocol, _, address in await _loop().getaddrinfo(host, port, type=socket.SOCK_STREAM):
        connection = socket.socket(family, kind, protocol)
        connection.setblocking(False)
        try:
            await _loop().sock_connect(connection, address)
        except BaseException as error:
            connection.close()
            if not isinstance(error, OSError):
                raise
            failure = error
        else:
            return connection
    raise failure or OSError(f"{host} has no address")


def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()
