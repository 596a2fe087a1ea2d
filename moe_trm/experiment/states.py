"""The states of an experiment's runs: one line of JSON each in `states.jsonl`, and the settings that they belong to.

Both files are written whole or not at all. A run that failed stays in them as an outcome.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

from moe_trm import __version__
from moe_trm.config.flat import as_yaml, different_keys
from moe_trm.errors import ConfigError, RunError
from moe_trm.experiment.plan import Plan, PlannedRun

FORMAT, VERSION = "moe-trm-experiment", 1
SETTINGS, STATES = "experiment.json", "states.jsonl"
MOST_CHANGES = 12
"""Changed settings that a refusal lists."""

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
        steps: in its `metrics.jsonl`.
        started_unix_s: begin of the last attempt.
        earlier: reasons of earlier ends.
    """

    run: str
    arm: str
    seed: int
    state: State = "waiting"
    reason: str = ""
    exit_status: int | None = None
    attempts: int = 0
    trained: bool = False
    seconds: float = 0.0
    steps: int = 0
    started_unix_s: float | None = None
    ended_unix_s: float | None = None
    earlier: list[str] = msgspec.field(default_factory=list)


class States:
    """The states of a plan's runs in its folder.

    A folder of other settings is refused with what changed. A run that the files call running was killed together with
    its experiment.

    Raises:
        ConfigError: the folder holds other settings, another experiment or files of another version.
        RunError: the files are damaged.
    """

    def __init__(self, plan: Plan) -> None:
        self._path = plan.folder / STATES
        self._states = {run.name: RunState(run=run.name, arm=run.arm, seed=run.seed) for run in plan.runs}
        if _same_settings(plan):
            self._states |= {state.run: state for state in _read(self._path)}
        for state in self._states.values():
            if state.state == "running":
                state.state, state.reason = "stopped", "the experiment ended while it ran"
                state.seconds += _seconds_until_its_last_word(state, log_of(plan.folder, state.run))

    def __iter__(self) -> Iterator[RunState]:
        return iter(self._states.values())

    def of(self, run: PlannedRun) -> RunState:
        return self._states[run.name]

    def begin(self, plan: Plan) -> None:
        """Make the folder and write both files."""
        plan.folder.mkdir(parents=True, exist_ok=True)
        document = {"format": FORMAT, "version": VERSION, "moe_trm": __version__, "settings": plan.settings()}
        _replace(plan.folder / SETTINGS, json.dumps(document, indent=1).encode() + b"\n")
        self.write()

    def write(self) -> None:
        """The states as they are now, whole or not at all."""
        _replace(self._path, b"".join(msgspec.json.encode(state) + b"\n" for state in self._states.values()))


def _same_settings(plan: Plan) -> bool:
    """True where the folder holds this experiment already, False where it holds none."""
    path = plan.folder / SETTINGS
    if not path.is_file():
        return False
    try:
        document: Any = json.loads(path.read_bytes())
        saved = document["settings"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise RunError(
            "the settings of this experiment cannot be read",
            where=str(path),
            got=repr(error),
            expected="what `moe-trm experiment` wrote",
            fix="Give --out another folder; what ran is in the run folders beside it.",
        ) from error
    if (document.get("format"), document.get("version")) != (FORMAT, VERSION):
        raise ConfigError(
            "this folder holds an experiment of another format",
            where=str(path),
            got=f"{document.get('format')} {document.get('version')}",
            expected=f"{FORMAT} {VERSION}",
            fix="Give --out another folder.",
        )
    now = json.loads(json.dumps(plan.settings()))
    changed = different_keys(saved, now)
    if changed:
        shown = [f"{key}: {_shown(saved, key)} -> {_shown(now, key)}" for key in changed[:MOST_CHANGES]]
        more = [f"and {len(changed) - MOST_CHANGES} more"] if len(changed) > MOST_CHANGES else []
        raise ConfigError(
            "the experiment in this folder was begun with other settings",
            where=str(plan.folder),
            got="\n".join([*shown, *more]),
            expected="the settings that it was begun with: they are fixed before the first run",
            fix="Restore the file, or give --out another folder to begin anew.",
        )
    return True


def log_of(folder: Path, run: str) -> Path:
    """The output of a run, of all its attempts."""
    return folder / "logs" / f"{run}.log"


def _seconds_until_its_last_word(state: RunState, log: Path) -> float:
    if state.started_unix_s is None or not log.is_file():
        return 0.0
    return max(0.0, log.stat().st_mtime - state.started_unix_s)


def _shown(flat: dict[str, Any], key: str) -> str:
    return as_yaml(flat[key]) if key in flat else "(absent)"


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
