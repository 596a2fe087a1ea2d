"""A child process that works for this one: its start, the calls that are open in it, and its end.

The other end is `moe_trm.runtime.child_service`. A `HangDetector` ends a child that hangs; a call that hangs ends at
its limit. What a call does wrong is its own. Only a process that dies or must be ended takes its other calls along;
they fail with `ChildEnded`, so that they can be repeated.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import msgspec

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
)
from moe_trm.runtime.children import gone
from moe_trm.runtime.frames import from_child
from moe_trm.runtime.hang import HangDetector, Health, Observation, state_of
from moe_trm.runtime.lifeline import signal_group
from moe_trm.runtime.patience import patient
from moe_trm.runtime.python import run_module

POLL_S = 0.1
"""Pause between two looks at the limits of calls."""
GRACE_S = 2.0
"""Time beyond a call's limit in which the child may end it by itself."""
ROUNDS = 3
"""Times that the event loop of a child must have come round after that, before the call is held to be deaf."""
LOOK_S = 2.0
"""Pause between two looks at a process."""
SILENT_LOOKS = 30
"""A process that neither answers nor computes at so many looks in turn hangs."""
STUCK_LOOKS = 300
"""The same for one that computes without an end."""

Answerer = Callable[[str, dict[str, Any]], Awaitable[Any]]
"""`await answer(op, arguments)` serves what a call asks for.

Raises `Refused`; any other error ends the call with it.
"""

log = logging.getLogger(__name__)


class Refused(Exception):
    """An answer that the call gets as an exception of this kind."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class CallFailed(Exception):
    """A call did not end well."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.what)
        self.problem = problem


class ChildEnded(Exception):
    """The process is gone, and with it the calls that were open in it."""


class NotStarted(Exception):
    """A child did not say that it is ready. `problem`: its own words, if it had any; `status`: its exit status."""

    def __init__(self, problem: Problem | None, status: int | None) -> None:
        super().__init__(problem.what if problem is not None else f"exit status {status}")
        self.problem, self.status = problem, status


@dataclass
class _Open:
    """A call that has not ended. `rounds`: rounds of the event loop when it was first found late."""

    result: asyncio.Future[Any]
    answer: Answerer | None
    deadline: float
    rounds: int | None = None
    answers: set[asyncio.Task[None]] = field(default_factory=set)


class Child:
    """A running child.

    Args:
        ready: the value of its `Ready`, the first message.
        limit_s: longest that a call may take.
        running: the call whose code is executed now and the second at which that began (`functions.current_call`);
            None where it is unknown.
        take: makes of a value what its caller gets; also of one that is no longer awaited.

    Attributes:
        health: `well`, `busy` (it answers late, as on a loaded machine) or `hung`.
        ended: it answers nothing any more.
    """

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        ready: Any,
        limit_s: float = math.inf,
        running: Callable[[], tuple[int, float]] | None = None,
        take: Callable[[Any], Any] | None = None,
    ) -> None:
        self._process, self.ready, self._limit_s, self._take = process, ready, limit_s, take
        self._running = running or _none_running
        self.health: Health = "well"
        self.ended = asyncio.Event()
        self._open: dict[int, _Open] = {}
        self._numbers = itertools.count(1)
        self._pings = self._rounds = 0
        self._detector = HangDetector(SILENT_LOOKS, STUCK_LOOKS)
        work = [self._receive(), self._watch(), *([self._hold_limits()] if math.isfinite(limit_s) else [])]
        self._tasks = [asyncio.create_task(coroutine) for coroutine in work]

    @classmethod
    async def start(
        cls,
        module: str,
        settings: Any,
        *,
        descriptor: int,
        startup_s: float,
        environment: Mapping[str, str] | None = None,
        limit_s: float = math.inf,
        running: Callable[[], tuple[int, float]] | None = None,
        take: Callable[[Any], Any] | None = None,
    ) -> Self:
        """A new process: `python -m MODULE DESCRIPTOR`, leader of a group of its own. Raises `NotStarted` once that is
        gone.

        Args:
            module: calls `child_service.serve`.
            settings: plain data that it begins with.
            descriptor: of memory that both share.
            startup_s: longest time until it is ready.
            environment: None for this process's own.
        """
        process = await asyncio.create_subprocess_exec(
            *run_module(module, str(descriptor)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            pass_fds=(descriptor,),
            env=dict(os.environ if environment is None else environment),
            start_new_session=True,
        )
        first = None
        try:
            assert process.stdin is not None
            process.stdin.write(pack(Hello(settings)))
            reading = from_child(process, _DECODER)
            first = await asyncio.wait_for(reading, patient(startup_s))
        except TimeoutError:
            pass
        finally:
            if not isinstance(first, Ready):
                signal_group(process.pid, signal.SIGKILL)
                await gone(process)
        if isinstance(first, Ready):
            return cls(process, first.value, limit_s, running, take)
        raise NotStarted(first.problem if isinstance(first, Broken) else None, process.returncode)

    @property
    def process_id(self) -> int:
        """The process id that the operating system gave it."""
        return self._process.pid

    @property
    def num_open(self) -> int:
        """Calls that have not ended."""
        return len(self._open)

    async def call(self, payload: Any, answer: Answerer | None = None) -> Any:
        """The value of a call with `payload`, which is plain data.

        Raises `CallFailed`, `ChildEnded`, and whatever `answer` raised but `Refused`.
        """
        if self.ended.is_set():
            raise ChildEnded
        number, now_s = next(self._numbers), time.monotonic()
        call = _Open(asyncio.get_running_loop().create_future(), answer, now_s + self._limit_s + patient(GRACE_S))
        self._open[number] = call
        try:
            try:
                self._send(Call(number, payload))
            except _UNSENDABLE as error:
                raise CallFailed(problem("type", f"what it is called with cannot be sent ({error})")) from error
            return await call.result
        except asyncio.CancelledError:
            self._send(Cancel(number))
            raise
        finally:
            self._open.pop(number, None)
            for task in call.answers:
                task.cancel()

    async def end(self, culprits: Iterable[int] = (), why: Problem | None = None) -> None:
        """Kill the process and all that it started, unless that has been done, and wait until it is gone.

        The calls of `culprits` fail with `why`; the others get `ChildEnded`.
        """
        guilty = frozenset(culprits)
        if not self.ended.is_set():
            self.ended.set()
            signal_group(self._process.pid, signal.SIGKILL)
            for number, call in self._open.items():
                if not call.result.done():
                    failed = why is not None and number in guilty
                    call.result.set_exception(CallFailed(why) if failed and why else ChildEnded())
        await gone(self._process)

    async def close(self) -> None:
        """End it and release what belongs to it."""
        try:
            await self.end()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _receive(self) -> None:
        """Take its messages until it ends."""
        try:
            while (message := await from_child(self._process, _DECODER)) is not None:
                if isinstance(message, Pong):
                    self._rounds += 1
                elif isinstance(message, Ask | Done | Failed):
                    self._settle(message)
        finally:
            if not self.ended.is_set():
                signal_group(self._process.pid, signal.SIGKILL)
                status = await self._process.wait()
                why = problem("crash", f"its process ended with exit status {status}")
                await self.end(self._culprits() if math.isfinite(self._limit_s) else (), why)

    def _settle(self, message: Ask | Done | Failed) -> None:
        outcome: Any = None
        if isinstance(message, Done):
            try:
                outcome = self._take(message.value) if self._take is not None else message.value
            except Exception as error:  # noqa: BLE001 (its caller must be told)
                outcome = error
        elif isinstance(message, Failed):
            outcome = CallFailed(message.problem)
        call = self._open.get(message.number)
        if call is None or call.result.done():
            return
        if isinstance(message, Ask):
            task = asyncio.create_task(self._answer(call, message))
            call.answers.add(task)
            task.add_done_callback(call.answers.discard)
        elif isinstance(outcome, Exception):
            call.result.set_exception(outcome)
        else:
            call.result.set_result(outcome)

    async def _answer(self, call: _Open, message: Ask) -> None:
        try:
            assert call.answer is not None, "a call that may ask has an answerer"
            value = await call.answer(message.op, message.arguments)
            try:
                self._send(Reply(message.number, message.ask, value))
            except _UNSENDABLE as error:
                raise CallFailed(problem("type", f"the answer to {message.op} cannot be sent ({error})")) from error
        except Refused as refusal:
            self._send(Reply(message.number, message.ask, problem("", str(refusal)).what, refusal.kind))
        except Exception as error:  # noqa: BLE001 (goes to the caller as it is: the call must not swallow it)
            if not call.result.done():
                call.result.set_exception(error)
                self._send(Cancel(message.number))

    def _culprits(self) -> list[int]:
        """The call whose code runs; else those that are late; else all."""
        running, _ = self._running()
        late = [number for number, call in self._open.items() if time.monotonic() > call.deadline]
        return [running] if running in self._open else late or [*self._open]

    async def _hold_limits(self) -> None:
        """End the process where a call holds it beyond its limit, or does not let itself be ended."""
        earlier = (0, 0.0)
        while True:
            await asyncio.sleep(POLL_S)
            seen, now_s = self._running(), time.monotonic()
            stuck = seen == earlier and seen[0] in self._open and 0 < seen[1] < now_s - self._limit_s
            earlier = seen
            guilty = [seen[0]] if stuck else self._deaf(now_s)
            if guilty:
                await self.end(guilty, problem("timeout", f"nothing within {self._limit_s:g} s"))
                return

    def _deaf(self, now_s: float) -> list[int]:
        """Late calls of a child whose event loop has come round since: it is not the machine that is slow."""
        late = {number: call for number, call in self._open.items() if now_s > call.deadline and not call.result.done()}
        if late:
            self._ping()
        for call in late.values():
            call.rounds = self._rounds if call.rounds is None else call.rounds
        return [number for number, call in late.items() if self._rounds >= (call.rounds or 0) + ROUNDS]

    async def _watch(self) -> None:
        """Look after it, and end it when it hangs."""
        while self.health != "hung":
            earlier = self._rounds
            self._ping()
            await asyncio.sleep(LOOK_S)
            try:
                ticks, state = state_of(self._process.pid)
            except OSError:
                return
            # While a call's code runs, its limit is what counts.
            answered = self._rounds != earlier or self._running()[0] in self._open
            last, self.health = self.health, self._detector.judge(Observation(answered, ticks, state))
            if self.health == "busy" and last == "well":
                log.info("process %d is busy: it answers late (state %s)", self._process.pid, state)
        log.warning("process %d hangs and is ended", self._process.pid)
        signal_group(self._process.pid, signal.SIGKILL)

    def _ping(self) -> None:
        """Ask for a round of the event loop, unless one is asked for: what is asked again and again comes at once."""
        if self._pings == self._rounds:
            self._pings += 1
            self._send(Ping())

    def _send(self, message: ToChild) -> None:
        pipe = self._process.stdin
        if not self.ended.is_set() and pipe is not None and not pipe.is_closing():
            pipe.write(pack(message))


def _none_running() -> tuple[int, float]:
    return 0, 0.0


_UNSENDABLE = (TypeError, ValueError, OverflowError, RecursionError)
_DECODER: msgspec.msgpack.Decoder[FromChild] = msgspec.msgpack.Decoder(FromChild)
