"""A run's folder is its history: what a start may change in it, and what it writes down."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import msgspec
from pydantic import ValidationError

from moe_trm.config.flat import as_yaml, different_keys, flatten
from moe_trm.config.removed import without_removed
from moe_trm.config.schema import Config
from moe_trm.errors import RunError
from moe_trm.run_folder import run_end
from moe_trm.run_folder.run import CHANGES_FILE, CHOICES, SERVERS_FILE
from moe_trm.runtime.lock import held_alone
from moe_trm.runtime.patience import patient
from moe_trm.runtime.private import append_private, write_private

END_OF_KILLED_S = 5.0
"""Time for the processes of an earlier start, which were killed, to be gone."""
ALL_DONE = "all steps are done, and nothing is left to do"
SUPERSEDED = "superseded"
_FILES = (
    "config.json",
    CHOICES,
    "metrics.jsonl",
    SERVERS_FILE,
    CHANGES_FILE,
    run_end.FILE,
    "report.html",
    "transcripts",
)
"""Files of a run's history, beside its checkpoints and the logs of its processes."""


def is_done(run_dir: Path, now: Mapping[str, Any]) -> bool:
    """True where nothing is left to do: the run has finished with `now`, these very settings.

    Raises `RunError` where the start would rewrite a finished run, or go on with other settings without
    `checkpoint.allow_changes`.
    """
    settings, end = now["checkpoint"], run_end.read_end(run_dir)
    if settings["resume"] == "never" or not has_steps(run_dir):
        return False
    changes = changes_since(run_dir, now)
    if end is not None and end.state == "finished":
        if settings["resume"] == "auto" and not changes:
            return True
        if settings["resume"] != "auto" or now["train"]["steps"] <= end.step:
            raise RunError(
                f"this run has finished: all its {end.step} steps are done",
                where=str(run_dir),
                got=_listed(changes) or f"checkpoint.resume={settings['resume']}",
                expected="the settings it finished with; a finished run is not rewritten",
                fix="Choose another `name` or `run_dir`, or raise train.steps with checkpoint.allow_changes=true."
                " checkpoint.resume=never begins anew, and sets aside what is there.",
            )
    if changes and not settings["allow_changes"]:
        raise RunError(
            "this run began with other settings",
            where=str(run_dir),
            got=_listed(changes),
            expected="the settings of its last start (config.json)",
            fix="Set checkpoint.allow_changes=true to go on with them, which the report then shows, or choose another"
            " `name` or `run_dir`. checkpoint.resume=never begins anew.",
        )
    return False


def only_trainer(lock: Path) -> AbstractContextManager[None]:
    """Hold a lock of a run's folder inside the `with`; see `held_alone`. Raises `RunError`."""
    return held_alone(
        lock,
        "trains into this folder",
        patience_s=patient(END_OF_KILLED_S),
        fix="choose another `name` or `run_dir` for this run",
    )


def has_steps(run_dir: Path) -> bool:
    """True for the folder of a run that has measured something."""
    metrics = run_dir / "metrics.jsonl"
    return metrics.is_file() and metrics.stat().st_size > 0


def changes_since(run_dir: Path, now: Mapping[str, Any]) -> list[Change]:
    """Differences from the last start in this folder; none where there was none that can be read."""
    try:
        saved = json.loads((run_dir / "config.json").read_bytes())
    except (OSError, ValueError):
        return []
    return differences(saved, now)


def begin(
    run_dir: Path, now: Mapping[str, Any], *, first_step: int, branched: Mapping[str, Any] | None
) -> list[Change]:
    """Write the settings of this start, and what they change; returns the changes. Only one rank may.

    A run that begins anew (after `first_step` 0) sets aside what an earlier one left. `branched`: settings of the
    checkpoint that it goes on from, where that is another run's.
    """
    if first_step == 0 and has_steps(run_dir):
        _set_aside(run_dir)
    changes: Sequence[Change] = []
    if first_step:
        changes = differences(branched, now) if branched is not None else changes_since(run_dir, now)
    for change in changes:
        line = {"step": first_step, "time/unix_s": time.time(), **msgspec.structs.asdict(change)}
        with append_private(run_dir / CHANGES_FILE) as file:
            file.write(msgspec.json.encode(line) + b"\n")
    write_private(run_dir / "config.json", f"{json.dumps(now, indent=2)}\n".encode())
    return list(changes)


def _set_aside(run_dir: Path) -> None:
    parent = run_dir / SUPERSEDED
    parent.mkdir(exist_ok=True)
    taken = [int(name) for name in os.listdir(parent) if name.isdigit()]
    aside = parent / str(max(taken, default=0) + 1)
    aside.mkdir()
    for name in _FILES:
        if (run_dir / name).exists():
            (run_dir / name).rename(aside / name)


def _listed(changes: Sequence[Change]) -> str:
    return "\n".join(map(str, changes))


ABSENT = "(absent)"
_FREE = (
    "name",
    "run_dir",
    "checkpoint.",
    "record.",
    "sync.",
    "observe.",
    "train.eval_every",
    "train.export",
    "train.max_restarts",
    "rollout.url",
    "rollout.router",
    "rollout.api_key",
    *(
        f"rollout.server.{name}"
        for name in (
            "host",
            "port",
            "startup_timeout_s",
            "max_restarts",
            "silence_timeout_s",
            "hang_timeout_s",
        )
    ),
)
"""Settings of a run's place, of its processes, and of what it shows and leaves behind."""


class Change(msgspec.Struct, frozen=True):
    """A setting that is another one now."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key}: {as_yaml(self.old)} -> {as_yaml(self.new)}"


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """Every setting that differs, in the order of the configuration.

    A setting that an older version did not have counts with its default, one that is gone does not count.
    """
    saved = without_removed(saved)
    with suppress(ValidationError):  # a version that had other settings: they are compared as they are
        saved = Config.model_validate(saved).dump()
    old, after = flatten(saved), flatten(now)
    return [
        Change(key, old.get(key, ABSENT), after.get(key, ABSENT))
        for key in different_keys(old, after)
        if not key.startswith(_FREE)
    ]
