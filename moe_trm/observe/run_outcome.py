"""`run.json` while a run trains, and the reason of its end."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from moe_trm.observe.sinks import Sink
from moe_trm.report.run_end import Failure, RunEnd, State, read_end, write_end


class RunOutcome(Sink):
    """Says that the run trains, as long as it does, and then how it ended.

    `first_step` is the step after which this start goes on, `last_step` the one that completes the run.
    """

    def __init__(self, run_dir: Path, *, first_step: int, last_step: int) -> None:
        self._run_dir, self._step, self._last, self._phase = run_dir, first_step, last_step, ""
        self._failed = False
        write_end(run_dir, RunEnd("running", first_step, time.time()))

    def enter(self, phase: str) -> None:
        self._phase = phase

    def write(self, step: int, metrics: Mapping[str, float | str]) -> None:
        self._step, self._phase = step, ""

    def failed(self, error: BaseException) -> None:
        self._failed = True
        # Another rank may have said it before, and this one lost the connection to it.
        record_failure(self._run_dir, error, step=self._step + 1, phase=self._phase, rank=0)

    def close(self) -> None:
        if not self._failed:
            state: State = "finished" if self._step >= self._last else "stopped"
            write_end(self._run_dir, RunEnd(state, self._step, time.time()))


def record_failure(
    run_dir: Path, error: BaseException | str, *, step: int = 0, phase: str = "", rank: int | None = None
) -> None:
    """Write why a run ended, unless that has been said: what failed first is why the others did.

    `error` is what was raised, or a sentence. `step` was in progress, in `phase`; 0: that of `run.json`. `rank`: of the
    learner that met it.
    """
    so_far = read_end(run_dir)
    if so_far is None or so_far.state != "running":
        return
    kind, told = ("the job", error) if isinstance(error, str) else (type(error).__name__, str(error))
    failure = Failure(kind, told, step or so_far.step + 1, phase, rank)
    write_end(run_dir, RunEnd("failed", max(so_far.step, step - 1), time.time(), failure))
