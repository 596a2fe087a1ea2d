"""The states of an experiment's runs: one line of JSON each in `states.jsonl`, and the settings that they belong to.

Both files are written whole or not at all. A run that failed stays in them as an outcome.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from moe_trm.errors import RunError
from moe_trm.tools.experiment.fixed import Fixed
from moe_trm.tools.experiment.plan import ExperimentPlan, PlannedRun

SETTINGS, STATES = "experiment.json", "states.jsonl"

State = Literal["waiting", "running", "finished", "failed", "stopped"]


class RunState(msgspec.Struct, kw_only=True):
    """Progress of a run.

    Attributes:
        state: `stopped` was killed or asked to stop, and goes on when the experiment does; `failed` is an outcome.
        reason: of the end of a run that failed or was stopped.
        exit_status: of its last process; None before its first end.
        attempts: processes that were started for it.
        trained: its training is done; what is left are evaluations.
        seconds: of all attempts, wall clock; of one that was killed with its experiment, until its last word.
        again: a second run of the baseline with this seed.
        steps: in its `metrics.jsonl`.
        started_unix_s: begin of the last attempt.
        code: version and commit of this package in the last attempt; empty where an older one did not say.
        earlier: reasons of earlier ends.
    """

    run: str
    arm: str
    seed: int
    again: bool = False
    state: State = "waiting"
    reason: str = ""
    exit_status: int | None = None
    attempts: int = 0
    trained: bool = False
    seconds: float = 0.0
    steps: int = 0
    started_unix_s: float | None = None
    ended_unix_s: float | None = None
    code: str = ""
    earlier: list[str] = msgspec.field(default_factory=list)


class States:
    """The states of a plan's runs in its folder, and in `fixed` its settings and what changed in arms that had not
    begun.

    A folder of other settings is refused with what changed (`Fixed`). A run that the files call running was killed
    together with its experiment. Raises `ConfigError` where the folder holds other settings, another experiment or
    files of another version, `RunError` where the files are damaged.
    """

    def __init__(self, plan: ExperimentPlan) -> None:
        self._path = plan.folder / STATES
        planned = {run.name: RunState(run=run.name, arm=run.arm, seed=run.seed, again=run.again) for run in plan.runs}
        self._states = planned
        settings = plan.folder / SETTINGS
        saved = settings.read_bytes() if settings.is_file() else None
        if saved is not None:
            self._states |= {state.run: state for state in _read(self._path)}
        started_arms = {state.arm for state in self if state.attempts}
        self.fixed = Fixed(plan.settings(), saved, started_arms, plan.folder)
        for state in self._states.values():
            if state.state == "running":
                state.state, state.reason = "stopped", "the experiment ended while it ran"
                state.seconds += _seconds_until_its_last_word(state, log_of(plan.folder, state.run))

    def __iter__(self) -> Iterator[RunState]:
        return iter(self._states.values())

    def of(self, run: PlannedRun) -> RunState:
        return self._states[run.name]

    def begin(self, plan: ExperimentPlan) -> None:
        """Make the folder and write both files."""
        plan.folder.mkdir(parents=True, exist_ok=True)
        _replace(plan.folder / SETTINGS, self.fixed.document())
        self.write()

    def write(self) -> None:
        """The states as they are now, whole or not at all."""
        _replace(self._path, b"".join(msgspec.json.encode(state) + b"\n" for state in self._states.values()))


def log_of(folder: Path, run: str) -> Path:
    """The output of a run, of all its attempts."""
    return folder / "logs" / f"{run}.log"


def _seconds_until_its_last_word(state: RunState, log: Path) -> float:
    if state.started_unix_s is None or not log.is_file():
        return 0.0
    return max(0.0, log.stat().st_mtime - state.started_unix_s)


def _read(path: Path) -> list[RunState]:
    if not path.is_file():
        return []
    try:
        return [msgspec.json.decode(line, type=RunState) for line in path.read_bytes().splitlines()]
    except msgspec.DecodeError as error:
        raise RunError(
            "the states of this experiment cannot be read",
            where=str(path),
            got=str(error),
            expected="one JSON object per run",
            fix="Give --out another folder; what ran is in the run folders beside it.",
        ) from error


def _replace(path: Path, content: bytes) -> None:
    partial = path.with_name(f"{path.name}.partial")
    partial.write_bytes(content)
    os.replace(partial, path)
