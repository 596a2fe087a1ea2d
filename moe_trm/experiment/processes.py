"""The runs of an experiment as processes: some at a time, each with its log, each outcome in the books."""

from __future__ import annotations

import fcntl
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from moe_trm.errors import RunError
from moe_trm.experiment.ending import ending, steps_of
from moe_trm.experiment.plan import Plan, PlannedRun
from moe_trm.experiment.states import RunState, States, log_of
from moe_trm.runtime.lifeline import Lifeline

POLL_S = 0.05
LOCK = "experiment.lock"

Command = Callable[[Plan, PlannedRun], Sequence[str]]
"""The command line of a run."""


def train_command(plan: Plan, run: PlannedRun) -> Sequence[str]:
    """The ordinary `moe-trm train`."""
    ranks = ["--nproc-per-node", str(plan.file.ranks)] if plan.file.ranks else []
    return [sys.executable, "-m", "moe_trm", "train", plan.file.base, *run.overrides, *ranks]


class Stop:
    """The first SIGINT or SIGTERM starts no further run and is passed on; runs finish their step and save."""

    def __init__(self) -> None:
        self.asked = 0
        self._times = 0

    @contextmanager
    def listening(self) -> Iterator[None]:
        before = {number: signal.signal(number, self._heard) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def pass_on(self, running: Iterable[Running]) -> None:
        """As often as it came, also to a run that began meanwhile: the second signal ends a run at once."""
        for each in running:
            while each.told < self._times:
                each.told += 1
                each.process.send_signal(signal.SIGTERM)

    def _heard(self, number: int, _frame: FrameType | None) -> None:
        self.asked = number
        self._times += 1
        print("asked to stop: no further run begins, and those that run save themselves", flush=True)


@dataclass
class Running:
    """A run's process. It is in a session of its own, and is killed when this process is gone."""

    run: PlannedRun
    process: subprocess.Popen[bytes]
    lifeline: Lifeline
    log: Path
    begins: int
    """Bytes in the log before this attempt."""
    since: float
    told: int = 0
    """Signals that were passed on."""

    def text(self) -> str:
        return self.log.read_bytes()[self.begins :].decode(errors="replace")


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """No other process works on the experiment in `folder`, inside the `with`. Raises `RunError`."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise RunError(
                "another process runs the experiment in this folder",
                where=str(folder),
                got="a lock that is held",
                expected="one `moe-trm experiment` at a time",
                fix="Wait for it, stop it, or give --out another folder.",
            ) from error
        yield


def run_all(
    plan: Plan,
    states: States,
    *,
    jobs: int = 1,
    retry_failed: bool = False,
    command: Command = train_command,
    say: Callable[[str], None] = print,
) -> int:
    """Run what has not finished; every change of state is written before anything else happens.

    Args:
        plan: what runs.
        states: of this plan; runs that finished or failed are not run again.
        jobs: runs at a time.
        retry_failed: run those that failed again; their reasons stay in the books.
        command: of a run.
        say: a line for whoever watches.
    Returns:
        The signal that asked to stop, 0 when no run is left.
    """
    ended = ("finished",) if retry_failed else ("finished", "failed")
    waiting = [run for run in plan.runs if states.of(run).state not in ended]
    stop, started = Stop(), dict[str, Running]()
    with stop.listening():
        while started or (waiting and not stop.asked):
            while waiting and len(started) < jobs and not stop.asked:
                run = waiting.pop(0)
                started[run.name] = _start(plan, run, states, command)
                say(f"{run.name}: {'goes on' if states.of(run).attempts > 1 else 'begins'} ({len(waiting)} wait)")
            stop.pass_on(started.values())
            for running in [each for each in started.values() if each.process.poll() is not None]:
                del started[running.run.name]
                state = _end(plan, running, states)
                say(f"{state.run}: {state.state}{f': {state.reason}' if state.reason else ''} ({state.seconds:.0f} s)")
            time.sleep(POLL_S)
    return stop.asked


def _start(plan: Plan, run: PlannedRun, states: States, command: Command) -> Running:
    state = states.of(run)
    if state.reason:
        state.earlier.append(state.reason)
    state.state, state.reason, state.exit_status = "running", "", None
    state.attempts += 1
    state.started_unix_s = time.time()
    states.write()
    log = log_of(plan.folder, run.name)
    log.parent.mkdir(exist_ok=True)
    with log.open("ab") as output:
        begins = output.tell()
        process = subprocess.Popen(
            command(plan, run), stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    return Running(run, process, Lifeline(process.pid), log, begins, time.monotonic())


def _end(plan: Plan, running: Running, states: States) -> RunState:
    running.lifeline.release()
    state, folder, status = states.of(running.run), plan.folder / running.run.name, running.process.returncode
    file = plan.file
    state.state, state.reason = ending(status, folder, running.text(), steps=file.steps, metric=file.primary_metric)
    state.exit_status, state.steps = status, steps_of(folder)
    state.seconds += time.monotonic() - running.since
    state.ended_unix_s = time.time()
    states.write()
    return state
