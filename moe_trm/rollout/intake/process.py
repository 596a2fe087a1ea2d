"""A running intake process as the controller sees it: the questions that are open in it, and its health."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import sys

import msgspec

from moe_trm.errors import ControllerError, EngineError, EngineLost, RecordRejected
from moe_trm.rollout.credentials import without_key
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
    Whole,
    pack,
)
from moe_trm.rollout.intake.pulse import Health, Look, Pulse, state_of
from moe_trm.rollout.intake.reading import Reading
from moe_trm.rollout.servers.http import EngineSlow, HttpStatusError, ServerFailed
from moe_trm.rollout.servers.question import Question
from moe_trm.runtime import wire
from moe_trm.runtime.children import gone
from moe_trm.runtime.frames import from_child
from moe_trm.runtime.shared_blocks import SharedFile
from moe_trm.types import RolloutRecord, SampledTurn

LOOK_S = 2.0
"""Pause between two looks at a process."""
SILENT_LOOKS = 30
"""A process that neither answers nor computes at so many looks in turn hangs."""
STUCK_LOOKS = 300
"""The same for one that computes without an end."""
STARTUP_S = 300.0
"""Longest time for imports; a loaded machine takes minutes."""

_ERRORS: dict[str, type[EngineError]] = {
    "slow": EngineSlow,
    "lost": EngineLost,
    "failed": ServerFailed,
    "refused": HttpStatusError,
}

log = logging.getLogger(__name__)


class IntakeEnded(Exception):
    """The process is gone, and with it the answers that were open in it."""


class IntakeProcess:
    """One process, running.

    Attributes:
        file: its records; it outlives the process.
        health: `well`, `busy` (it answers late, as on a loaded machine) or `hung`.
        ended: it answers nothing any more.
    """

    def __init__(self, process: asyncio.subprocess.Process, file: SharedFile) -> None:
        self._process, self.file = process, file
        self.health: Health = "well"
        self.ended = asyncio.Event()
        self._open: dict[int, asyncio.Future[Reading]] = {}
        self._numbers, self._pong, self._turns = itertools.count(1), False, 0
        self._pulse = Pulse(SILENT_LOOKS, STUCK_LOOKS)
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._watch())]

    @classmethod
    async def start(cls, hello: Hello) -> IntakeProcess:
        """A new process. Raises `ControllerError` for one that does not start."""
        file = SharedFile()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "moe_trm.rollout.intake.worker", str(file.descriptor)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            pass_fds=(file.descriptor,),
            env=without_key(os.environ),
            start_new_session=True,
        )
        assert process.stdin is not None
        first = None
        try:
            process.stdin.write(pack(hello))
            reading = from_child(process, _DECODER)
            first = await asyncio.wait_for(reading, STARTUP_S)
        except TimeoutError:
            pass
        finally:
            if not isinstance(first, Ready):
                _kill(process)
                await gone(process)
        if isinstance(first, Ready):
            return cls(process, file)
        raise ControllerError(
            "an intake process did not start",
            got=f"exit status {process.returncode}",
            expected=f"a message within {STARTUP_S:g} s",
            fix="Its last words are in the controller's log. rollout.intake_processes=0 works without any.",
            may_pass=True,
        )

    @property
    def process_id(self) -> int:
        """Of the operating system."""
        return self._process.pid

    @property
    def num_open(self) -> int:
        """Questions without an answer."""
        return len(self._open)

    async def ask(self, url: str, question: Question, whole: Whole | None) -> Reading:
        """The checked answer of the server at `url`.

        Raises `IntakeEnded`, `RecordRejected` as `reading.read` does, and `EngineError` as `EngineHttp.request` does.
        """
        if self.ended.is_set():
            raise IntakeEnded
        number = next(self._numbers)
        self._open[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(Ask(number, url, question, whole))
            return await self._open[number]
        except asyncio.CancelledError:
            self._send(Cancel(number))
            raise
        finally:
            del self._open[number]

    async def close(self) -> None:
        """End the process. Records that it left stay."""
        _kill(self._process)
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await gone(self._process)

    async def _receive(self) -> None:
        """Take its messages until it ends."""
        try:
            while (message := await from_child(self._process, _DECODER)) is not None:
                if isinstance(message, Pong):
                    self._pong, self._turns = True, message.turns
                elif not isinstance(message, Ready):
                    self._settle(message)
        finally:
            _kill(self._process)
            self.ended.set()
            self._tasks[1].cancel()
            for future in self._open.values():
                if not future.done():
                    future.set_exception(IntakeEnded())

    def _settle(self, message: Parsed | Rejected | Failed) -> None:
        """Give an answer to who waits for it. Its block is opened in any case: else nobody gave its memory back."""
        try:
            outcome: Reading | Exception = self._reading(message) if isinstance(message, Parsed) else _error(message)
        except ControllerError as error:
            outcome = error
        future = self._open.get(message.number)
        if future is None or future.done():
            return
        if isinstance(outcome, Reading):
            future.set_result(outcome)
        else:
            future.set_exception(outcome)

    def _reading(self, message: Parsed) -> Reading:
        frames: list[bytes | memoryview] = [message.body, *self.file.open(message.block)]
        value = wire.decode(frames, RolloutRecord) if message.whole else wire.decode(frames, SampledTurn)
        return Reading(value, message.retracted, message.written)

    async def _watch(self) -> None:
        """Look after it, and end it when it hangs."""
        while self.health != "hung":
            self._pong = False
            self._send(Ping())
            await asyncio.sleep(LOOK_S)
            try:
                ticks, state = state_of(self._process.pid)
            except OSError:
                return
            before, self.health = self.health, self._pulse.judge(Look(self._pong, self._turns, ticks, state))
            if self.health == "busy" and before == "well":
                log.info("intake process %d is busy: it answers late (state %s)", self._process.pid, state)
        log.warning("intake process %d hangs and is ended", self._process.pid)
        _kill(self._process)

    def _send(self, message: ToProcess) -> None:
        pipe = self._process.stdin
        if not self.ended.is_set() and pipe is not None and not pipe.is_closing():
            pipe.write(pack(message))


def _error(message: Rejected | Failed) -> Exception:
    if isinstance(message, Rejected):
        return RecordRejected(
            message.reason,
            message.what,
            where=message.where,
            got=message.got,
            expected=message.expected,
            fix=message.fix,
        )
    told = {"where": message.where, "got": message.got, "expected": message.expected, "fix": message.fix}
    if message.kind == "error":
        what = f"an intake process failed: {message.what}"
        return ControllerError(what, **told, may_pass=True)  # type: ignore[arg-type]
    error = _ERRORS[message.kind](message.what, **told)  # type: ignore[arg-type]
    if isinstance(error, HttpStatusError):
        error.status = message.status
    return error


def _kill(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return


_DECODER: msgspec.msgpack.Decoder[FromProcess] = msgspec.msgpack.Decoder(FromProcess)
