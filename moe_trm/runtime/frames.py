"""Messages over the pipes of a child process: msgpack, each behind its length. Never pickle."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from typing import Any, BinaryIO, TypeVar

import msgspec

T = TypeVar("T")

_LENGTH = struct.Struct("<I")


def frame(message: object, enc_hook: Callable[[Any], Any] | None = None) -> bytes:
    """The bytes of one message. Raises `TypeError` or `OverflowError` for a value that is no plain data."""
    body = msgspec.msgpack.encode(message, enc_hook=enc_hook)
    return _LENGTH.pack(len(body)) + body


async def from_child(process: asyncio.subprocess.Process, decoder: msgspec.msgpack.Decoder[T]) -> T | None:
    """The next message of a child; None when there are no more, or what comes is none."""
    assert process.stdout is not None
    try:
        (length,) = _LENGTH.unpack(await process.stdout.readexactly(_LENGTH.size))
        return decoder.decode(await process.stdout.readexactly(length))
    except (asyncio.IncompleteReadError, msgspec.DecodeError):
        return None


def from_parent(source: BinaryIO, decoder: msgspec.msgpack.Decoder[T]) -> T | None:
    """The next message of the process that started this one; None when it is gone, or left half a one."""
    head = source.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    body = source.read(length)
    return decoder.decode(body) if len(body) == length else None
