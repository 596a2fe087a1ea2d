"""An intake process: `python -m moe_trm.rollout.intake.worker DESCRIPTOR`, started by `IntakeProcess`.

It sends requests to the engines, receives their answers, checks them, and leaves the records in its shared file
(`DESCRIPTOR`).
"""

from __future__ import annotations

import asyncio
import pkgutil
import resource
import sys
import traceback
from typing import Any

import msgspec

from moe_trm.errors import MoeTrmError
from moe_trm.rollout.intake.messages import IntakeSettings, Parsed, Question
from moe_trm.rollout.intake.reading import Reader
from moe_trm.runtime import wire
from moe_trm.runtime.child_messages import Problem, problem, problem_of
from moe_trm.runtime.child_service import Asker, serve
from moe_trm.runtime.shared_blocks import BlockWriter
from moe_trm.types import RolloutRecord


class IntakeService:
    """Reads answers and writes their records.

    Args:
        settings: what the controller said.
        writer: of the shared file.
    """

    def __init__(self, settings: IntakeSettings, writer: BlockWriter) -> None:
        self.ready = None
        self._writer = writer
        self._reader: Reader = pkgutil.resolve_name(settings.reader)(settings.settings)

    def begin(self, loop: asyncio.AbstractEventLoop) -> None:
        """Nothing to do."""

    async def call(self, payload: Any, ask: Asker) -> Parsed:
        """See `Service.call`."""
        question = msgspec.convert(payload, Question)
        reading = await self._reader.read(question.url, question.asked)
        body, *buffers = wire.encode(reading.value)
        return Parsed(
            bytes(body),
            self._writer.write(buffers),
            whole=isinstance(reading.value, RolloutRecord),
            retracted=reading.retracted,
            written=reading.written,
        )

    def problem(self, error: BaseException) -> Problem:
        """See `Service.problem`."""
        if isinstance(error, MoeTrmError):
            return problem_of(error)
        traceback.print_exception(error)
        return problem("error", f"{type(error).__name__}: {error}")

    def refusal(self, kind: str, text: str) -> Exception:
        """Never asked for: an intake process asks for nothing."""
        return RuntimeError(f"{kind}: {text}")


def main(descriptor: int) -> None:
    """Serve whoever holds the other ends of standard input and output."""
    # One connection for each request in flight.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    serve(lambda settings: IntakeService(msgspec.convert(settings, IntakeSettings), BlockWriter(descriptor)))


if __name__ == "__main__":
    main(int(sys.argv[1]))
