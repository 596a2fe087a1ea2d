"""An intake process: `python -m moe_trm.rollout.intake.worker DESCRIPTOR`, started by `IntakeProcess`.

It sends requests to the engines, receives their answers, checks them, and leaves the records in its shared file
(`DESCRIPTOR`).
"""

from __future__ import annotations

import asyncio
import resource
import sys
import traceback
from typing import Any

import msgspec

from moe_trm.errors import MoeTrmError
from moe_trm.methods.load import load_function
from moe_trm.rollout.intake.messages import IntakeCall, IntakeSettings, Parsed
from moe_trm.rollout.intake.reading import Reading, read
from moe_trm.rollout.servers.http import EngineHttp
from moe_trm.rollout.servers.question import AnswerFormat
from moe_trm.runtime import wire
from moe_trm.runtime.child_messages import Problem, problem, problem_of
from moe_trm.runtime.child_service import Asker, serve
from moe_trm.runtime.shared_blocks import BlockWriter
from moe_trm.tasks.tokens import Tokens
from moe_trm.types import RolloutRecord


class IntakeService:
    """Reads answers and writes their records.

    Args:
        settings: what the controller said.
        writer: of the shared file.
    """

    def __init__(self, settings: IntakeSettings, writer: BlockWriter) -> None:
        self.ready = None
        self._settings, self._writer = settings, writer
        self._format = answer_format(settings.answers)
        self._tokens = Tokens(settings.tokenizer) if settings.tokenizer else None
        self._servers: dict[str, EngineHttp] = {}
        self._room = Room()

    def begin(self, loop: asyncio.AbstractEventLoop) -> None:
        """Nothing to do."""

    async def call(self, payload: Any, ask: Asker) -> Parsed:
        """See `Service.call`."""
        reading = await self._reading(msgspec.convert(payload, IntakeCall))
        body, *buffers = wire.encode(reading.value)
        return Parsed(
            bytes(body),
            self._writer.write(buffers),
            whole=isinstance(reading.value, RolloutRecord),
            retracted=reading.retracted,
            written=reading.written,
        )

    async def _reading(self, call: IntakeCall) -> Reading:
        path, request = self._format.generate_path, self._format.request(call.question)
        async with Visit(self._room) as visit:
            body = await self._server(call.url).request("POST", path, request, admit=visit.enter)
            return read(body, call.question, call.whole, self._settings.model, self._tokens, self._format)

    def _server(self, url: str) -> EngineHttp:
        if url not in self._servers:
            known = self._settings
            self._servers[url] = EngineHttp(
                url, known.api_key, timeout_s=known.timeout_s, max_attempts=known.max_attempts
            )
        return self._servers[url]

    def problem(self, error: BaseException) -> Problem:
        """See `Service.problem`."""
        if isinstance(error, MoeTrmError):
            return problem_of(error)
        traceback.print_exception(error)
        return problem("error", f"{type(error).__name__}: {error}")

    def refusal(self, kind: str, text: str) -> Exception:
        """Never asked for: an intake process asks for nothing."""
        return RuntimeError(f"{kind}: {text}")


def answer_format(name: str) -> AnswerFormat:
    """The `AnswerFormat` of this name. Raises `ConfigError`."""
    made: AnswerFormat = load_function(name, key="rollout.engine")()
    return made


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


def main(descriptor: int) -> None:
    """Serve the process at the other ends of standard input and output."""
    # One connection for each request in flight.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    serve(lambda settings: IntakeService(msgspec.convert(settings, IntakeSettings), BlockWriter(descriptor)))


if __name__ == "__main__":
    main(int(sys.argv[1]))
