"""The child's end of `moe_trm.runtime.child`: takes calls and runs each as a task of one event loop.

What a process prints goes to standard error; the messages have descriptors of their own. A thread reads them, so the
process ends with its parent even while its event loop never comes round.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import reprlib
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, BinaryIO, Protocol

import msgspec

from moe_trm.errors import MoeTrmError
from moe_trm.runtime.child_messages import (
    Ask,
    Broken,
    Call,
    Cancel,
    Done,
    Failed,
    FromChild,
    Hello,
    Ping,
    Pong,
    Problem,
    Ready,
    Reply,
    ToChild,
    pack,
    problem,
    problem_of,
)
from moe_trm.runtime.frames import from_parent

Asker = Callable[[str, dict[str, Any]], Awaitable[Any]]
"""`await ask(op, arguments)` asks the parent for something."""

CALL: contextvars.ContextVar[int] = contextvars.ContextVar("call", default=0)
"""The call that the running task belongs to."""


class Service(Protocol):
    """The work of a child."""

    ready: Any
    """Its description of itself: plain data."""

    def begin(self, loop: asyncio.AbstractEventLoop) -> None:
        """Act once in the event loop, before the first call."""

    async def call(self, payload: Any, ask: Asker) -> Any:
        """The value of a call: plain data."""

    def problem(self, error: BaseException) -> Problem:
        """The message to the parent about an error of `call`."""

    def refusal(self, kind: str, text: str) -> Exception:
        """The exception that a call gets where the parent refuses what it asks for."""


def serve(begin: Callable[[Any], Service]) -> None:
    """Serve the process at the other ends of standard input and output until it is gone.

    Args:
        begin: makes the service of the settings. A `MoeTrmError` of it is told to the parent.
    """
    source, sink, lock = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb"), threading.Lock()
    os.dup2(2, 1)

    def send(message: FromChild) -> None:
        body = pack(message)
        with lock:
            sink.write(body)
            sink.flush()

    hello = from_parent(source, _DECODER)
    if not isinstance(hello, Hello):  # the process that started this one is gone
        return
    try:
        service = begin(hello.settings)
    except MoeTrmError as error:
        send(Broken(problem_of(error)))
        return
    asyncio.run(_Calls(service, send).run(source))


class _Calls:
    """The calls that are open. One event loop owns it."""

    def __init__(self, service: Service, send: Callable[[FromChild], None]) -> None:
        self._service, self._send = service, send
        self._running: dict[int, asyncio.Task[None]] = {}
        self._asked: dict[tuple[int, int], asyncio.Future[Any]] = {}
        self._num_asked = 0

    async def run(self, source: BinaryIO) -> None:
        """Answer until the parent closes the pipe."""
        loop = asyncio.get_running_loop()
        self._service.begin(loop)
        threading.Thread(target=_read, args=(source, loop, self._receive), daemon=True).start()
        self._send(Ready(self._service.ready))
        await asyncio.Event().wait()

    def _receive(self, message: ToChild) -> None:
        if isinstance(message, Ping):
            self._send(Pong())
        elif isinstance(message, Call):
            context = contextvars.copy_context()
            context.run(CALL.set, message.number)
            task = asyncio.get_running_loop().create_task(self._run(message), context=context)
            self._running[message.number] = task
            task.add_done_callback(lambda _: self._running.pop(message.number, None))
        elif isinstance(message, Cancel) and message.number in self._running:
            self._running[message.number].cancel()
        elif isinstance(message, Reply):
            future = self._asked.pop((message.number, message.ask), None)
            if future is not None and not future.done():
                if message.error:
                    future.set_exception(self._service.refusal(message.error, message.value))
                else:
                    future.set_result(message.value)

    async def _run(self, call: Call) -> None:
        try:
            value = await self._service.call(call.payload, partial(self._ask, call.number))
        except (Exception, SystemExit) as error:  # noqa: BLE001 (a user's code may raise anything)
            self._send(Failed(call.number, self._problem_of(error)))
            return
        try:
            self._send(Done(call.number, value))
        except Exception as error:  # noqa: BLE001 (numbers of other libraries may raise anything)
            self._send(Failed(call.number, problem("type", f"{reprlib.repr(value)} ({error})")))

    def _problem_of(self, error: BaseException) -> Problem:
        try:
            return self._service.problem(error)
        except Exception:  # noqa: BLE001 (an exception that cannot say what it is)
            return problem("error", type(error).__name__)

    async def _ask(self, number: int, op: str, arguments: dict[str, Any]) -> Any:
        self._num_asked += 1
        ask = self._num_asked
        future = self._asked[number, ask] = asyncio.get_running_loop().create_future()
        try:
            self._send(Ask(number, ask, op, arguments))
            return await future
        finally:
            self._asked.pop((number, ask), None)


def _read(source: BinaryIO, loop: asyncio.AbstractEventLoop, receive: Callable[[ToChild], None]) -> None:
    while (message := from_parent(source, _DECODER)) is not None:
        loop.call_soon_threadsafe(receive, message)
    os._exit(0)


_DECODER: msgspec.msgpack.Decoder[ToChild] = msgspec.msgpack.Decoder(ToChild)
