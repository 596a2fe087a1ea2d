"""A user's command line as a process group of its own: bounded in time and output, ended with all its children."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from typing import Any

from moe_trm.runtime.children import end_group
from moe_trm.runtime.functions.process import FunctionFailed
from moe_trm.runtime.lifeline import kill_marked

KEPT_BYTES = 2000
"""The end of a command's output that an error tells."""


async def run_command(
    command: Sequence[str], environment: Mapping[str, str], *, mark: str, limit_s: float, max_output_bytes: int
) -> None:
    """Run a command until it ends, then end what it left behind. No shell reads it.

    Args:
        environment: all of its environment.
        mark: `NAME=VALUE` of `environment`, which no other process has. By it, children are found that left the group.
        max_output_bytes: most that it may print. The output is read and forgotten, but for its end.

    Raises `FunctionFailed`: `error` (another exit status than 0), `crash` (ended by a signal, or never started),
    `timeout` (after `limit_s`), or `output` (more than it may print), with the end of its output.
    """
    output = _Output(max_output_bytes)
    started = asyncio.ensure_future(_start(command, environment, output))
    try:
        # It cannot be given up half-way, or what has begun would never be ended.
        process = await asyncio.shield(started)
    except asyncio.CancelledError:
        await _end(await started, mark)
        await output.close()
        raise
    ended = asyncio.ensure_future(process.wait())
    try:
        either: set[asyncio.Future[Any]] = {ended, output.flooded}
        await asyncio.wait(either, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        in_time = ended.done()
    finally:
        await _end(process, mark)
        ended.cancel()
        await output.close()
    if output.flooded.done():
        raise FunctionFailed("output", f"more than {max_output_bytes} bytes of output{output.last_words()}")
    if not in_time:
        raise FunctionFailed("timeout", f"nothing within {limit_s:g} s{output.last_words()}")
    status = process.returncode
    assert status is not None, "it has ended"
    if status < 0:
        raise FunctionFailed("crash", f"ended by {signal.Signals(-status).name}{output.last_words()}")
    if status:
        raise FunctionFailed("error", f"exit status {status}{output.last_words()}")


async def _start(command: Sequence[str], environment: Mapping[str, str], output: _Output) -> asyncio.subprocess.Process:
    reading, writing = os.pipe()
    try:
        await output.listen(reading)
        return await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=writing,
            stderr=writing,
            env=dict(environment),
            start_new_session=True,
        )
    except OSError as error:
        refusal = FunctionFailed("crash", f"it cannot be started: {error}")
        refusal.__cause__ = error
    finally:
        os.close(writing)
    await output.close()
    raise refusal


async def _end(process: asyncio.subprocess.Process, mark: str) -> None:
    """End the group of `process` and whatever else has its mark: asked to first, then by force."""
    try:
        # A command that has ended by itself usually leaves no process behind that could be asked.
        await end_group(process.pid)
    finally:
        await asyncio.to_thread(kill_marked, mark)
    await process.wait()


class _Output(asyncio.Protocol):
    """Reader of a command's output: counts it, and keeps its end."""

    def __init__(self, most: int) -> None:
        self._most, self._read, self._end = most, 0, b""
        loop = asyncio.get_running_loop()
        self._closed: asyncio.Future[None] = loop.create_future()
        self.flooded: asyncio.Future[None] = loop.create_future()
        self._pipe: asyncio.ReadTransport | None = None

    async def listen(self, descriptor: int) -> None:
        """Read from `descriptor`, which belongs to this object from now on."""
        pipe = os.fdopen(descriptor, "rb", 0)
        self._pipe, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: self, pipe)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        self._read += len(data)
        self._end = (self._end + data)[-KEPT_BYTES:]
        if self._read > self._most and not self.flooded.done():
            self.flooded.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        if not self._closed.done():
            self._closed.set_result(None)

    async def close(self) -> None:
        """Read what is left, unless somebody still holds the other end, and stop."""
        if self._pipe is None:
            return
        await asyncio.wait({self._closed}, timeout=1.0)
        self._pipe.close()
        await self._closed

    def last_words(self) -> str:
        """The end of the output, for an error."""
        text = self._end.decode(errors="replace").strip()
        return f"; its last words: {text}" if text else "; it printed nothing"
