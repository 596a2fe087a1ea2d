"""The outcome of one run's process: finished, failed with a reason, or stopped and to be gone on with."""

from __future__ import annotations

import math
import signal
from pathlib import Path

from moe_trm.errors import RunError
from moe_trm.experiment.progress import State
from moe_trm.experiment.stages import RunStage
from moe_trm.report.run import Run, read_run

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
