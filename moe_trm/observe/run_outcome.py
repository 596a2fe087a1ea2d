"""`run.json` while a run trains, and the reason of its end."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from moe_trm.observe.sinks import Sink
from moe_trm.run_folder.run_end import RunEnd, State, record_failure, write_end


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
