"""The intake processes together: the least loaded one gets each question; one that ends is replaced.

What was open in a process that ended is asked again. Records that it had finished stay, since their memory is not its
own. So no sample is lost, and the books need not know.
"""

from __future__ import annotations

import asyncio
import logging
import weakref

import msgspec

from moe_trm.errors import RecordRejected
from moe_trm.rollout.intake.messages import IntakeSettings, WholeSample
from moe_trm.rollout.intake.process import IntakeProcess
from moe_trm.rollout.intake.reading import Reading
from moe_trm.rollout.servers.question import Question
from moe_trm.runtime.child import ChildEnded
from moe_trm.runtime.shared_blocks import SharedFile

REISSUES = 3
"""Times that a question is asked again because its process ended: it may be what ends them."""

log = logging.getLogger(__name__)


class IntakePool:
    """Keeps `count` processes running, from the first question on.

    Attributes:
        lost: processes that ended by themselves, or hung.
        reissued: questions asked again for that.
    """

    def __init__(self, count: int, settings: IntakeSettings) -> None:
        self._count, self._settings = count, settings
        self._running: list[IntakeProcess] = []
        self._started: set[IntakeProcess] = set()
        self._keepers: list[asyncio.Task[None]] = []
        self._changed = asyncio.Condition()
        self._failure: BaseException | None = None
        self._files: weakref.WeakSet[SharedFile] = weakref.WeakSet()
        self.lost = self.reissued = 0

    @property
    def process_ids(self) -> list[int]:
        """Process ids of the workers that run now."""
        return [process.child.process_id for process in self._running]

    def decode_with(self, checkpoint: str) -> None:
        """Processes started from now on decode whole samples with the tokenizer of this folder."""
        self._settings = msgspec.structs.replace(self._settings, tokenizer=checkpoint)

    async def ask(self, url: str, question: Question, whole: WholeSample | None = None) -> Reading:
        """See `IntakeProcess.ask`.

        Raises `RecordRejected` (`intake_failed`) where processes end on this question again and again, and
        `ControllerError` where none starts.
        """
        for attempt in range(REISSUES + 1):
            process = await self._ready()
            try:
                return await process.ask(url, question, whole)
            except ChildEnded:
                self.reissued += attempt < REISSUES
        raise RecordRejected(
            "intake_failed",
            "the intake process ended every time this answer was read",
            where=url,
            got=f"{REISSUES + 1} times",
            expected="an answer",
            fix="The controller's log has its last words.",
        )

    async def start(self) -> None:
        """Return when every process runs. Raises `ControllerError`."""
        self._begin()
        async with self._changed:
            await self._changed.wait_for(lambda: self._failure or len(self._running) == self._count)
        if self._failure is not None:
            raise self._failure

    def metrics(self) -> dict[str, float]:
        """Now: `rollout/intakes` that run, `rollout/intakes_busy` of them, and `rollout/intake_bytes` that their
        records take.

        Totals: `rollout/intake_losses`, processes that ended or hung; `rollout/intake_reissued`, answers asked for
        again because of that.
        """
        return {
            "rollout/intakes": float(len(self._running)),
            "rollout/intakes_busy": float(sum(process.child.health != "well" for process in self._running)),
            "rollout/intake_bytes": float(sum(file.used_bytes for file in self._files)),
            "rollout/intake_losses": float(self.lost),
            "rollout/intake_reissued": float(self.reissued),
        }

    async def close(self) -> None:
        """End the processes."""
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        # One that had just ended was not waited for to the end.
        await asyncio.gather(*(process.child.close() for process in self._started))

    def _begin(self) -> None:
        if not self._keepers:
            self._keepers = [asyncio.create_task(self._keep()) for _ in range(self._count)]

    async def _ready(self) -> IntakeProcess:
        self._begin()
        async with self._changed:
            await self._changed.wait_for(lambda: self._failure or self._able())
        if self._failure is not None:
            raise self._failure
        return min(self._able(), key=lambda process: process.child.num_open)

    def _able(self) -> list[IntakeProcess]:
        return [process for process in self._running if not process.child.ended.is_set()]

    async def _keep(self) -> None:
        """One place: a process runs in it, and the next one when it ends."""
        try:
            while True:
                process = await IntakeProcess.start(self._settings)
                self._started.add(process)
                self._files.add(process.file)
                await self._stand_in(process)
                self._started.discard(process)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 (callers that wait for a process must be told)
            async with self._changed:
                self._failure = self._failure or error
                self._changed.notify_all()

    async def _stand_in(self, process: IntakeProcess) -> None:
        async with self._changed:
            self._running.append(process)
            self._changed.notify_all()
        try:
            await process.child.ended.wait()
            self.lost += 1
            log.warning("intake process %d ended; another one is started", process.child.process_id)
        finally:
            self._running.remove(process)
            await process.child.close()
