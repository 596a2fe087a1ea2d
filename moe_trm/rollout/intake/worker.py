"""An intake process: `python -m moe_trm.rollout.intake.worker DESCRIPTOR`, started by `IntakeProcess`.

It sends requests to the engines, receives their answers, checks them, and leaves the records in its shared file
(`DESCRIPTOR`). Output goes to standard error; the messages have a descriptor of their own. A thread reads them, so the
process says that it is there while it reads a long answer, and ends with its controller.
"""

from __future__ import annotations

import asyncio
import os
import resource
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, BinaryIO

import msgspec

from moe_trm.errors import EngineError, EngineLost, MoeTrmError, RecordRejected
from moe_trm.functions.load import load_function
from moe_trm.rollout.intake.messages import (
    Ask,
    Cancel,
    Failed,
    FromProcess,
    Hello,
    Parsed,
    Ping,
    Pong,
    Ready,
    Rejected,
    ToProcess,
    pack,
)
from moe_trm.rollout.intake.reading import read
from moe_trm.rollout.intake.receiving import Reception, Room
from moe_trm.rollout.servers.http import HEADERS, EngineSlow, HttpStatusError, ServerFailed
from moe_trm.rollout.servers.question import AnswerFormat
from moe_trm.runtime import wire
from moe_trm.runtime.frames import from_parent
from moe_trm.runtime.shared_blocks import BlockWriter
from moe_trm.tasks.tokens import Tokens
from moe_trm.types import RolloutRecord

TURN_S = 0.2
"""Pause between two turns of the event loop that are counted."""


class Intake:
    """Asks, reads and writes. One event loop owns it; `turns` is read by others.

    Args:
        hello: what the controller said.
        writer: of the shared file.
        send: gives a message to the controller.
    """

    def __init__(self, hello: Hello, writer: BlockWriter, send: Callable[[FromProcess], None]) -> None:
        self._hello, self._writer, self._send = hello, writer, send
        self._format = answer_format(hello.answers)
        self._tokens = Tokens(hello.tokenizer) if hello.tokenizer else None
        key = {"Authorization": f"Bearer {hello.api_key}"} if hello.api_key else {}
        self._headers = {**HEADERS, **key}
        self._room = Room()
        self._asking: dict[int, asyncio.Task[None]] = {}
        self.turns = 0

    def receive(self, message: ToProcess) -> None:
        """Act on one message."""
        if isinstance(message, Ask):
            task = asyncio.ensure_future(self._answer(message))
            self._asking[message.number] = task
            task.add_done_callback(lambda _: self._asking.pop(message.number, None))
        elif isinstance(message, Cancel) and message.number in self._asking:
            self._asking[message.number].cancel()

    async def turn(self) -> None:
        """Count the turns of the event loop, for ever."""
        while True:
            self.turns += 1
            await asyncio.sleep(TURN_S)

    async def _answer(self, ask: Ask) -> None:
        hello = self._hello
        reception = Reception(
            ask.url, self._headers, self._room, timeout_s=hello.timeout_s, max_attempts=hello.max_attempts
        )
        try:
            body = await reception.answer(self._format.generate_path, self._format.request(ask.question))
            self._send(self._parsed(ask, body))
        except RecordRejected as rejection:
            self._send(Rejected(ask.number, rejection.reason, *_parts(rejection)))
        except EngineError as error:
            status = error.status if isinstance(error, HttpStatusError) else 0
            self._send(Failed(ask.number, _kind(error), *_parts(error), status=status))
        except Exception as error:  # noqa: BLE001 (whoever waits for the answer must be told)
            traceback.print_exc()
            what = f"{type(error).__name__}: {error}"
            self._send(Failed(ask.number, "error", what, "", None, None, "The controller's log has more."))
        finally:
            reception.leave()

    def _parsed(self, ask: Ask, body: memoryview) -> Parsed:
        reading = read(body, ask.question, ask.whole, self._hello.model, self._tokens, self._format)
        value, *buffers = wire.encode(reading.value)
        return Parsed(
            ask.number,
            bytes(value),
            self._writer.write(buffers),
            whole=isinstance(reading.value, RolloutRecord),
            retracted=reading.retracted,
            written=reading.written,
        )


def answer_format(name: str) -> AnswerFormat:
    """The `AnswerFormat` of this name. Raises `ConfigError`."""
    made: AnswerFormat = load_function(name, key="rollout.engine")()
    return made


def _kind(error: EngineError) -> Any:
    if isinstance(error, EngineSlow):
        return "slow"
    if isinstance(error, ServerFailed):
        return "failed"
    return "lost" if isinstance(error, EngineLost) else "refused"


def _parts(error: MoeTrmError) -> tuple[str, str, str | None, str | None, str]:
    got, expected = (None if value is None else str(value) for value in (error.got, error.expected))
    return error.what, error.where, got, expected, error.fix


async def serve(hello: Hello, descriptor: int, source: BinaryIO, sink: BinaryIO) -> None:
    """Answer until the controller closes the pipe."""
    loop, lock = asyncio.get_running_loop(), threading.Lock()

    def send(message: FromProcess) -> None:
        with lock:
            sink.write(pack(message))
            sink.flush()

    intake = Intake(hello, BlockWriter(descriptor), send)
    threading.Thread(target=_read, args=(source, loop, intake, send), daemon=True).start()
    send(Ready())
    await intake.turn()


def _read(
    source: BinaryIO, loop: asyncio.AbstractEventLoop, intake: Intake, send: Callable[[FromProcess], None]
) -> None:
    decoder = msgspec.msgpack.Decoder(ToProcess)
    while (message := from_parent(source, decoder)) is not None:
        if isinstance(message, Ping):
            send(Pong(intake.turns))
        else:
            loop.call_soon_threadsafe(intake.receive, message)
    os._exit(0)


def main(descriptor: int) -> None:
    """Serve whoever holds the other ends of standard input and output."""
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    # One connection for each request in flight.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    hello = from_parent(source, msgspec.msgpack.Decoder(ToProcess))
    if hello is None:  # whoever started this process is gone
        return
    asyncio.run(serve(hello, descriptor, source, sink))


if __name__ == "__main__":
    main(int(sys.argv[1]))
