"""The runs of an experiment as processes: some at a time, each with its log, each outcome in the books."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from launch.job import Signals
from moe_trm.errors import RunError
from moe_trm.run_folder.run import Run, read_run
from moe_trm.runtime.lock import held_alone
from moe_trm.runtime.owned_process import OwnedProcess
from moe_trm.tools.experiment.code import code_version
from moe_trm.tools.experiment.plan import ExperimentPlan, PlannedRun
from moe_trm.tools.experiment.progress import RunState, State, States, log_of
from moe_trm.tools.experiment.stages import RunStage, Stages, stages

POLL_S = 0.05
LOCK = "experiment.lock"


@dataclass
class RunProcess:
    """A stage of a run, as a process."""

    run: PlannedRun
    stage: RunStage
    later_stages: Sequence[RunStage]
    process: OwnedProcess
    log: Path
    begins: int
    """Bytes in the log before this attempt."""
    since: float
    num_signals: int = 0
    """Signals that were passed on."""

    def pass_on(self, signals: Signals) -> None:
        """As often as a signal came: after the first the run finishes its step and saves, the second ends it."""
        while self.num_signals < signals.count:
            self.num_signals += 1
            self.process.send_signal(signal.SIGTERM)

    def text(self) -> str:
        return self.log.read_bytes()[self.begins :].decode(errors="replace")


def alone(folder: Path) -> AbstractContextManager[None]:
    """No other process works on the experiment in `folder`, inside the `with`. Raises `RunError`."""
    return held_alone(folder / LOCK, "runs the experiment in this folder", fix="give --out another folder")


def left_to_run(
    plan: ExperimentPlan,
    states: States,
    *,
    retry_failed: bool = False,
    arms: Sequence[str] = (),
    seeds: Sequence[int] = (),
) -> list[PlannedRun]:
    """The runs that have not ended, in the order of the plan: of these arms and seeds (all if none are named), failed
    ones if retried.
    """
    ended = ("finished",) if retry_failed else ("finished", "failed")
    arms, seeds = arms or tuple(plan.file.arms), seeds or plan.file.seeds
    return [run for run in plan.runs if run.arm in arms and run.seed in seeds and states.of(run).state not in ended]


def run_all(
    plan: ExperimentPlan,
    states: States,
    pending: Sequence[PlannedRun],
    *,
    jobs: int = 1,
    made_of: Stages = stages,
    say: Callable[[str], None] = print,
) -> int:
    """Run what is left, `jobs` at a time; every change of state is written before anything else happens.

    The reasons of earlier ends stay in the books. Returns the signal that asked to stop, 0 when no run is left.
    """
    waiting, started, announced = list(pending), dict[str, RunProcess](), False
    with Signals() as signals:
        signals.begin()
        while started or (waiting and not signals.first):
            while waiting and len(started) < jobs and not signals.first:
                run = waiting.pop(0)
                started[run.name] = _start(plan, run, states, made_of(plan, run))
                say(f"{run.name}: {'goes on' if states.of(run).attempts > 1 else 'begins'} ({len(waiting)} wait)")
            if signals.first and not announced:
                announced = True
                say("asked to stop: no further run begins, and those that run save themselves")
            for running in started.values():
                running.pass_on(signals)
            for running in [ended for ended in started.values() if ended.process.poll() is not None]:
                state = _end(plan, running, states, stopping=bool(signals.first))
                if state.state == "running":
                    started[state.run] = _next(plan, running.run, states, running.later_stages)
                    continue
                del started[state.run]
                say(f"{state.run}: {state.state}{f': {state.reason}' if state.reason else ''} ({state.seconds:.0f} s)")
            time.sleep(POLL_S)
    return signals.first


def _start(plan: ExperimentPlan, run: PlannedRun, states: States, made_of: Sequence[RunStage]) -> RunProcess:
    """The first process of an attempt: what earlier ones did is not done again."""
    state = states.of(run)
    if state.reason:
        state.earlier.append(state.reason)
    state.reason = ""
    state.attempts += 1
    pending = [stage for stage in made_of if not (state.trained if stage.result is None else stage.result.is_file())]
    return _next(plan, run, states, pending or made_of[-1:])


def _next(plan: ExperimentPlan, run: PlannedRun, states: States, pending: Sequence[RunStage]) -> RunProcess:
    state, (stage, *later) = states.of(run), pending
    state.state, state.exit_status, state.started_unix_s = "running", None, time.time()
    state.code = code_version()
    states.write()
    log = log_of(plan.folder, run.name)
    log.parent.mkdir(exist_ok=True)
    with log.open("ab") as output:
        begins = output.tell()
        environment = {**os.environ, **stage.environment}
        process = OwnedProcess(stage.command, environment, input=subprocess.DEVNULL, output=output, errors=output)
    return RunProcess(run, stage, later, process, log, begins, time.monotonic())


def _end(plan: ExperimentPlan, running: RunProcess, states: States, *, stopping: bool) -> RunState:
    """The state after a process; it stays `running` where another stage follows."""
    running.process.release()
    state, folder, status = states.of(running.run), plan.folder / running.run.name, running.process.wait()
    file, log = plan.file, running.text()
    if running.stage.result is None:
        outcome = ending(status, folder, log, steps=file.steps, metric=file.primary_metric)
        state.trained = outcome[0] == "finished"
    else:
        outcome = ending_of_evaluation(status, running.stage, log)
    if outcome[0] == "finished" and running.later_stages:
        outcome = (
            ("stopped", f"asked to stop before its {running.later_stages[0].name}") if stopping else ("running", "")
        )
    state.state, state.reason = outcome
    state.exit_status, state.steps = status, steps_of(folder)
    state.seconds += time.monotonic() - running.since
    state.ended_unix_s = time.time()
    states.write()
    return state


MOST_LINES = 12
"""Lines of a log that are kept as the reason of a failure."""
_STOPPED = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)


def ending(status: int, folder: Path, log: str, *, steps: int, metric: str) -> tuple[State, str]:
    """The state of a run after its process, and the reason unless it finished.

    `status` is the exit status, negative of a signal that killed it. To finish, the run has to have made all `steps`
    and measured `metric`, which decides.
    """
    if (number := _signal(status)) is not None:
        return "stopped", f"ended by {number} after step {steps_of(folder)}"
    if status != 0:
        return "failed", reason_in(log) or f"exit status {status} without a word"
    try:
        run = read_run(folder)
    except RunError as error:
        return "failed", f"it ended well and left no result: {error.what}"
    if run.last_step < steps:
        return "failed", f"it ended after step {run.last_step} of {steps}"
    return _measured(run, metric)


def ending_of_evaluation(status: int, stage: RunStage, log: str) -> tuple[State, str]:
    """As `ending`, of an evaluation of what a run left."""
    if (number := _signal(status)) is not None:
        return "stopped", f"ended by {number} in its {stage.name}"
    if status != 0:
        return "failed", f"{stage.name}: {reason_in(log) or f'exit status {status} without a word'}"
    if stage.result is None or not stage.result.is_file():
        return "failed", f"{stage.name}: it ended well and left no result"
    return "finished", ""


def _signal(status: int) -> str | None:
    """The name of the signal that ended a process to be gone on with."""
    number = -status if status < 0 else status - 128
    return signal.Signals(number).name if number in list(map(int, _STOPPED)) else None


def _measured(run: Run, metric: str) -> tuple[State, str]:
    """A run whose primary metric is missing or not finite at its end has failed, whatever its exit status."""
    points = run.series(metric)
    if not points:
        return "failed", f"it never measured {metric}"
    step, value = points[-1]
    if value is None or not math.isfinite(value):
        return "failed", f"{metric} was not finite at step {step}"
    if metric.startswith("eval/") and step != run.last_step:
        return "failed", f"{metric} was last measured at step {step} of {run.last_step}"
    return "finished", ""


def steps_of(folder: Path) -> int:
    """Steps in a run's metrics; 0 where there are none yet."""
    try:
        return read_run(folder).last_step
    except RunError:
        return 0


def reason_in(log: str) -> str:
    """From the last `error:` on; else the last line that does not only say where the report is."""
    lines = [line.rstrip() for line in log.splitlines() if line.strip() and not line.startswith("report: ")]
    begins = [place for place, line in enumerate(lines) if line.lstrip().startswith("error:")]
    if begins:
        return "\n".join(lines[begins[-1] :][:MOST_LINES])
    return lines[-1] if lines else ""
