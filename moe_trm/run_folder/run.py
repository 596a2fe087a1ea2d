"""Reader of a run directory: its configuration, its steps, and its unreadable files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import orjson

from moe_trm.errors import RunError
from moe_trm.run_folder.run_end import outcome

Row = Mapping[str, Any]
CHOICES = "choices.json"
"""File of a run directory with what every `auto` became: a list of `key`, `value` and `reason`."""
SERVERS_FILE = "servers.jsonl"
"""One object for each loss and each return of a rollout server."""
CHANGES_FILE = "settings.jsonl"
"""One object (`step`, `key`, `old`, `new`) for each setting that a resumption changed."""


@dataclass(frozen=True)
class Run:
    """Files of a run so far.

    Attributes:
        folder: the run directory.
        config: the resolved configuration; empty when config.json is missing.
        rows: the steps of `metrics.jsonl` in order; numbers, text, or None for values that were not finite. The last
            line of a step counts.
        notes: remarks on damaged, missing or unfinished files.
        choices: what every `auto` became, and why; a sentence each.
    """

    folder: Path
    config: Mapping[str, Any]
    rows: Sequence[Row]
    notes: tuple[str, ...]
    choices: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return str(self.config.get("name", self.folder.resolve().name))

    @property
    def planned_steps(self) -> int | None:
        steps = self.config.get("train", {}).get("steps")
        return steps if isinstance(steps, int) else None

    @property
    def last_step(self) -> int:
        return int(self.rows[-1]["step"])

    @property
    def complete(self) -> bool:
        """True when every planned step is there; False when the plan is unknown."""
        return self.planned_steps is not None and self.last_step >= self.planned_steps

    def series(self, metric: str) -> list[tuple[int, float | None]]:
        """`(step, value)` of every step that has the metric; None where its value was not finite."""
        return [(row["step"], row[metric]) for row in self.rows if metric in row and not isinstance(row[metric], str)]

    def metrics(self) -> list[str]:
        """Names of all numeric metrics, sorted."""
        names = {name for row in self.rows for name, value in row.items() if not isinstance(value, str)}
        return sorted(names - {"step"})


def read_run(folder: Path) -> Run:
    """Read `folder`. Raises `RunError` when there is no run in it, or nothing in the run yet."""
    if not folder.is_dir():
        raise RunError(
            "there is no such run directory",
            where=str(folder),
            got="a file" if folder.exists() else "nothing",
            expected="a folder with config.json and metrics.jsonl, usually runs/NAME",
        )
    path = folder / "metrics.jsonl"
    config, notes = _config(folder / "config.json")
    if not path.is_file() and not (folder / "config.json").is_file():
        inside = sorted(child.name for child in folder.iterdir() if (child / "metrics.jsonl").is_file())
        raise RunError(
            "this folder holds no run",
            where=str(folder),
            got=f"runs in {', '.join(inside)}" if inside else "neither config.json nor metrics.jsonl",
            expected="both",
            fix=f"moe-trm report {folder / inside[0]}" if inside else "give the folder of one run, usually runs/NAME",
        )
    content = path.read_bytes() if path.is_file() else b""
    rows, damaged = _rows(content)
    if not rows:
        raise RunError(
            "no line of metrics.jsonl can be read" if damaged else "the run has not finished a step yet",
            where=str(path),
            got=f"{len(damaged)} damaged lines" if damaged else "no step" if path.is_file() else "no metrics.jsonl",
            expected="one JSON object per step",
            fix=_why_no_step(folder),
        )
    if damaged:
        lines = ", ".join(str(number) for number in damaged[:10]) + (", ..." if len(damaged) > 10 else "")
        notes.append(f"Damaged lines of metrics.jsonl were left out: {lines} ({len(damaged)} in all).")
    choices = _choices(folder / CHOICES)
    if choices is None:
        notes.append(f"{CHOICES} cannot be read, so what `auto` became is not shown.")
    return Run(folder, config, rows, tuple(notes), choices or ())


def _why_no_step(folder: Path) -> str:
    state, trouble = outcome(folder, complete=False)
    where = "rollout.log and controller.log beside it say more"
    return f"the run {state}: {trouble}; {where}" if trouble else f"wait for the first step; {where}"


class _Choice(msgspec.Struct):
    key: str
    value: Any
    reason: str


def _choices(path: Path) -> tuple[str, ...] | None:
    """Empty for a run that was started before they were kept; None where they are damaged."""
    if not path.is_file():
        return ()
    try:
        choices = msgspec.json.decode(path.read_bytes(), type=list[_Choice])
    except msgspec.DecodeError:
        return None
    return tuple(f"{made.key}: auto -> {made.value}: {made.reason}" for made in choices)


def _config(path: Path) -> tuple[dict[str, Any], list[str]]:
    if not path.is_file():
        return {}, ["config.json is missing, so the settings of this run are not known."]
    try:
        config = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as error:
        return {}, [f"config.json cannot be read ({error}), so the settings of this run are not known."]
    return (config, []) if isinstance(config, dict) else ({}, ["config.json holds no settings."])


def _rows(content: bytes) -> tuple[list[Row], list[int]]:
    """Steps in order, and the numbers of damaged lines. A last line without its end is one that is being written."""
    rows: dict[int, Row] = {}
    damaged = []
    for number, line in enumerate(content.splitlines(keepends=True), start=1):
        row = _row(line)
        if row is not None:
            rows[row["step"]] = row
        elif line.endswith(b"\n") and line.strip():
            damaged.append(number)
    return [rows[step] for step in sorted(rows)], damaged


def _row(line: bytes) -> Row | None:
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    good = isinstance(row, dict) and type(row.get("step")) is int
    return row if good and all(_plain(value) for value in row.values()) else None


def _plain(value: object) -> bool:
    return value is None or (isinstance(value, (str, int, float)) and not isinstance(value, bool))
