"""The running process of a user's function, and the calls that are open in it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from moe_trm.errors import ConfigError, MoeTrmError
from moe_trm.functions.current_call import SIZE, CurrentCall
from moe_trm.functions.messages import (
    Ask,
    Broken,
    Call,
    Cancel,
    Done,
    Failed,
    FromProcess,
    Hello,
    Ready,
    Reply,
    ToProcess,
    pack,
)
from moe_trm.runtime.frames import from_child

POLL_S = 0.1
"""Between two looks at the current."""
GRACE_S = 2.0
"""Time beyond a call's limit in which the call may report its own timeout."""
STARTUP_S = 120.0
"""Limit for importing the function's module."""

Answerer = Callable[[str, dict[str, Any]], Awaitable[Any]]
"""`await answer(op, arguments)` serves what a call asks for.

Raises `Refused`; any other error ends the call with it.
"""


class FunctionFailed(MoeTrmError):
    """A call did not end well.

    `reason`: `error`, `timeout`, `type` as in `messages.Failed`, or `crash` (its process ended).
    """

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class Refused(Exception):
    """An answer that the function gets as an exception: `kind` is a key of `Hosted.errors`."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class ProcessEnded(Exception):
    """The process was ended because of another call."""


@dataclass
class _Open:
    """A call that has not ended."""

    result: asyncio.Future[Any]
    answer: Answerer | None
    deadline: float
    answers: set[asyncio.Task[None]] = field(default_factory=set)


class Process:
    """A running worker process."""

    def __init__(self, process: asyncio.subprocess.Process, current: CurrentCall, ready: Ready, limit_s: float) -> None:
        self._process, self._current, self.ready, self._limit_s = process, current, ready, limit_s
        self._open: dict[int, _Open] = {}
        self._number = 0
        self.ended = False
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._watch())]

    @classmethod
    async def start(cls, hello: Hello) -> Process:
        with tempfile.TemporaryFile() as cell:
            os.ftruncate(cell.fileno(), SIZE)
            current = CurrentCall(cell.fileno())
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "moe_trm.functions.worker", str(cell.fileno())),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                pass_fds=(cell.fileno(),),
                start_new_session=True,
            )
        first = None
        try:
            assert process.stdin is not None
            process.stdin.write(pack(hello))
            reading = from_child(process, _DECODER)
            first = await asyncio.wait_for(reading, STARTUP_S)
        except TimeoutError:
            pass
        finally:
            if not isinstance(first, Ready):
                _kill(process)
                await process.wait()
                current.close()
        if isinstance(first, Ready):
            return cls(process, current, first, hello.limit_s)
        if isinstance(first, Broken):
            raise ConfigError(
                first.what, where=first.where, got=first.got, expected=first.expected or None, fix=first.fix
            )
        raise ConfigError(
            "the function's process did not start",
            where=f"config key {hello.key}",
            got=f"{hello.function}: exit status {process.returncode}",
            expected=f"its module imported within {STARTUP_S:g} s",
        )

    async def call(self, payload: Any, answer: Answerer | None) -> Any:
        if self.ended:
            raise ProcessEnded
        self._number += 1
        number = self._number
        call = _Open(asyncio.get_running_loop().create_future(), answer, time.monotonic() + self._limit_s + GRACE_S)
        self._open[number] = call
        try:
            self._send(Call(number, payload))
            return await call.result
        except asyncio.CancelledError:
            self._send(Cancel(number))
            raise
        finally:
            self._open.pop(number, None)
            for task in call.answers:
                task.cancel()

    async def end(self, culprits: frozenset[int], reason: str, text: str = "") -> None:
        """Kill the process, unless that has been done, and wait until it is gone.

        Calls of `culprits` fail; the others are repeated.
        """
        if not self.ended:
            self.ended = True
            _kill(self._process)
            for number, call in self._open.items():
                if not call.result.done():
                    call.result.set_exception(FunctionFailed(reason, text) if number in culprits else ProcessEnded())
        await self._process.wait()

    async def close(self) -> None:
        """End it and release what belongs to it."""
        await self.end(frozenset(), "crash")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._current.close()

    async def _receive(self) -> None:
        while (message := await from_child(self._process, _DECODER)) is not None:
            number = message.number if not isinstance(message, Ready | Broken) else 0
            call = self._open.get(number)
            if call is None or call.result.done():
                continue
            if isinstance(message, Ask):
                task = asyncio.create_task(self._answer(call, message))
                call.answers.add(task)
                task.add_done_callback(call.answers.discard)
            elif isinstance(message, Done):
                call.result.set_result(message.value)
            elif isinstance(message, Failed):
                call.result.set_exception(FunctionFailed(message.reason, message.text))
        running, _ = self._current.read()
        culprits = frozenset([running] if running in self._open else self._open)
        status = await self._process.wait()
        await self.end(culprits, "crash", f"its process ended with exit status {status}")

    async def _answer(self, call: _Open, message: Ask) -> None:
        try:
            assert call.answer is not None, "a call that may ask has an answerer"
            value = await call.answer(message.op, message.arguments)
        except Refused as refusal:
            self._send(Reply(message.number, message.ask, str(refusal), refusal.kind))
        except Exception as error:  # noqa: BLE001 (goes to the caller as it is: the function must not swallow it)
            if not call.result.done():
                call.result.set_exception(error)
                self._send(Cancel(message.number))
        else:
            self._send(Reply(message.number, message.ask, value))

    async def _watch(self) -> None:
        before = (0, 0.0)
        while True:
            await asyncio.sleep(POLL_S)
            now = time.monotonic()
            seen = self._current.read()
            stuck = seen == before and seen[0] in self._open and now - seen[1] > self._limit_s
            before = seen
            late = frozenset([seen[0]]) if stuck else frozenset(n for n, c in self._open.items() if now > c.deadline)
            if late:
                await self.end(late, "timeout", f"nothing within {self._limit_s:g} s")
                return

    def _send(self, message: ToProcess) -> None:
        pipe = self._process.stdin
        if not self.ended and pipe is not None and not pipe.is_closing():
            pipe.write(pack(message))


def _kill(process: asyncio.subprocess.Process) -> None:
    """The process and all processes that it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


_DECODER: msgspec.msgpack.Decoder[FromProcess] = msgspec.msgpack.Decoder(FromProcess)
