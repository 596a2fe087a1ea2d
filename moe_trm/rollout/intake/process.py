"""A running intake process as the controller sees it."""

from __future__ import annotations

import os

import msgspec

from moe_trm.errors import ControllerError, RecordRejected
from moe_trm.rollout.credentials import without_key
from moe_trm.rollout.intake.messages import IntakeCall, IntakeSettings, Parsed, WholeSample
from moe_trm.rollout.intake.reading import Reading
from moe_trm.rollout.servers.http import ERRORS
from moe_trm.rollout.servers.question import Question
from moe_trm.runtime import wire
from moe_trm.runtime.child import CallFailed, Child, NotStarted
from moe_trm.runtime.child_messages import error_of
from moe_trm.runtime.shared_blocks import SharedFile
from moe_trm.types import RolloutRecord, SampledTurn

STARTUP_S = 300.0
"""Longest time for imports; a loaded machine takes minutes."""


class IntakeProcess:
    """One process, running.

    Attributes:
        child: the process.
        file: its records; it outlives the process.
    """

    def __init__(self, child: Child, file: SharedFile) -> None:
        self.child, self.file = child, file

    @classmethod
    async def start(cls, settings: IntakeSettings) -> IntakeProcess:
        """A new process. Raises `ControllerError` for one that does not start."""
        file = SharedFile()
        try:
            child = await Child.start(
                "moe_trm.rollout.intake.worker",
                settings,
                descriptor=file.descriptor,
                startup_s=STARTUP_S,
                environment=without_key(os.environ),
                # Also for an answer that is no longer awaited: otherwise its memory would never be given back.
                take=lambda value: _reading(msgspec.convert(value, Parsed), file),
            )
        except NotStarted as error:
            raise ControllerError(
                "an intake process did not start",
                got=str(error),
                expected=f"a message within {STARTUP_S:g} s",
                fix="Its last words are in the controller's log. rollout.intake_processes=0 works without any.",
                may_pass=True,
            ) from error
        return cls(child, file)

    async def ask(self, url: str, question: Question, whole: WholeSample | None = None) -> Reading:
        """The checked answer of the server at `url`; the record of `whole`, where no push cut it.

        Raises `ChildEnded`, `RecordRejected`, and what `EngineHttp.request` raises.
        """
        try:
            reading: Reading = await self.child.call(IntakeCall(url, question, whole))
        except CallFailed as failure:
            error = error_of(failure.problem, _KINDS)
            raise error or ControllerError(
                f"an intake process failed: {failure.problem.what}",
                fix="The controller's log has more.",
                may_pass=True,
            ) from failure
        return reading


def _reading(parsed: Parsed, file: SharedFile) -> Reading:
    frames: list[bytes | memoryview] = [parsed.body, *file.open(parsed.block)]
    value = wire.decode(frames, RolloutRecord) if parsed.whole else wire.decode(frames, SampledTurn)
    return Reading(value, parsed.retracted, parsed.written)


_KINDS = {kind.__name__: kind for kind in (RecordRejected, *ERRORS)}
