"""The process of a user's function: `python -m moe_trm.functions.worker BOARD_DESCRIPTOR`, started by `FunctionHost`.

Output of the function goes to standard error; the messages have a separate descriptor. A thread reads them, so the
process ends with its parent even while the function never returns.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import sys
import threading
import traceback
import types
from collections.abc import Callable, Coroutine, Generator
from typing import Any, BinaryIO

import msgspec

from moe_trm.errors import ConfigError
from moe_trm.functions.current_call import CurrentCall
from moe_trm.functions.hosted import Hosted
from moe_trm.functions.load import load_function, place_in, place_of
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
from moe_trm.runtime.frames import from_parent

_CALL: contextvars.ContextVar[int] = contextvars.ContextVar("call", default=0)
_LONGEST_TEXT = 2000
_NUM_TOLD = 3
"""Tracebacks written to standard error; after that the function is known to fail."""


class Worker:
    """Runs calls as tasks of one event loop and says on the board whose code is being executed."""

    def __init__(
        self,
        function: Callable[..., Any],
        hosted: Hosted,
        hello: Hello,
        board: CurrentCall,
        send: Callable[[FromProcess], None],
    ) -> None:
        self._function = function
        self._hosted, self._limit_s, self._board, self._send = hosted, hello.limit_s, board, send
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._asked: dict[tuple[int, int], asyncio.Future[Any]] = {}
        self._num_asked = self._num_told = 0

    def receive(self, message: ToProcess) -> None:
        """Act on one message; called in the event loop."""
        if isinstance(message, Call):
            context = contextvars.copy_context()
            context.run(_CALL.set, message.number)
            task = asyncio.get_running_loop().create_task(self._run(message), context=context)
            self._calls[message.number] = task
            task.add_done_callback(lambda _: self._calls.pop(message.number, None))
        elif isinstance(message, Cancel) and message.number in self._calls:
            self._calls[message.number].cancel()
        elif isinstance(message, Reply):
            future = self._asked.pop((message.number, message.ask), None)
            if future is not None and not future.done():
                if message.error:
                    future.set_exception(self._hosted.errors[message.error](message.value))
                else:
                    future.set_result(message.value)

    def marked(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        """A task factory: tasks that a call starts belong to it, and the board shows whose code runs."""
        context = options.get("context")
        number = context[_CALL] if context is not None and _CALL in context else _CALL.get()
        return asyncio.Task(self._marked(number, coroutine) if number else coroutine, loop=loop, **options)

    async def _marked(self, number: int, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return await _stretches(number, coroutine, self._board)

    async def _run(self, call: Call) -> None:
        try:
            async with asyncio.timeout(self._limit_s) as limit:
                value = await self._hosted.call(call.payload, lambda op, given: self._ask(call.number, op, given))
        except (Exception, SystemExit) as error:  # noqa: BLE001 (the user's code may raise anything)
            reason = "timeout" if isinstance(error, TimeoutError) and limit.expired() else "error"
            text = f"nothing within {self._limit_s:g} s" if reason == "timeout" else self._raised(error)
            if reason == "error" and self._num_told < _NUM_TOLD:
                self._num_told += 1
                traceback.print_exception(error)
            self._send(Failed(call.number, reason, text[:_LONGEST_TEXT]))
            return
        try:
            self._send(Done(call.number, value))
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            self._send(Failed(call.number, "type", f"{value!r:.200} ({error})"))

    def _raised(self, error: BaseException) -> str:
        return f"{type(error).__name__}: {error} ({place_in(error, self._function)})"

    async def _ask(self, number: int, op: str, arguments: dict[str, Any]) -> Any:
        self._num_asked += 1
        ask = self._num_asked
        future = self._asked[number, ask] = asyncio.get_running_loop().create_future()
        try:
            self._send(Ask(number, ask, op, arguments))
            return await future
        finally:
            self._asked.pop((number, ask), None)


@types.coroutine
def _stretches(number: int, coroutine: Coroutine[Any, Any, Any], board: CurrentCall) -> Generator[Any, Any, Any]:
    """Drive `coroutine` as `await` does, with the board saying `number` while its code runs."""
    step, given = coroutine.send, None
    while True:
        board.begin(number)
        try:
            waits_for = step(given)
        except StopIteration as stop:
            return stop.value
        finally:
            board.end()
        try:
            step, given = coroutine.send, (yield waits_for)
        except BaseException as error:  # noqa: BLE001 (cancellation and errors belong to the coroutine)
            step, given = coroutine.throw, error


async def serve(
    hello: Hello,
    function: Callable[..., Any],
    hosted: Hosted,
    board: CurrentCall,
    source: BinaryIO,
    sink: BinaryIO,
) -> None:
    """Answer calls until the parent closes the pipe."""
    loop = asyncio.get_running_loop()

    def send(message: FromProcess) -> None:
        sink.write(pack(message))
        sink.flush()

    worker = Worker(function, hosted, hello, board, send)
    loop.set_task_factory(worker.marked)
    threading.Thread(target=_read, args=(source, loop, worker.receive), daemon=True).start()
    send(Ready(hosted.batched, hosted.concurrent, place_of(function)))
    await asyncio.Event().wait()


def _read(source: BinaryIO, loop: asyncio.AbstractEventLoop, receive: Callable[[ToProcess], None]) -> None:
    decoder = msgspec.msgpack.Decoder(ToProcess)
    while (message := from_parent(source, decoder)) is not None:
        loop.call_soon_threadsafe(receive, message)
    os._exit(0)


def main(descriptor: int) -> None:
    """Load the function that the first message names, and serve."""
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    hello = from_parent(source, msgspec.msgpack.Decoder(ToProcess))
    if hello is None:  # whoever started this process is gone
        return
    try:
        adapt = load_function(hello.adapter, key=hello.key)
        function = load_function(hello.function, key=hello.key)
        hosted: Hosted = adapt(function, hello)
    except ConfigError as error:
        sink.write(pack(Broken(error.what, error.where, str(error.got), str(error.expected), error.fix)))
        sink.flush()
        return
    asyncio.run(serve(hello, function, hosted, CurrentCall(descriptor), source, sink))


if __name__ == "__main__":
    main(int(sys.argv[1]))
