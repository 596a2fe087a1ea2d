"""Progress and end of a run: `run.json` of its folder."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Literal

import msgspec

from moe_trm.runtime.lock import holder_of
from moe_trm.runtime.private import write_private

FILE = "run.json"
LEARNER_LOCK = ".learner.lock"
"""Held by the first learner rank of a run as long as it lives (`moe_trm.runtime.lock`)."""


State = Literal["running", "finished", "stopped", "failed"]


class Failure(msgspec.Struct, frozen=True):
    """The error that ended a run.

    Attributes:
        kind: class of the exception, or who ended.
        told: its message, which names the sample where one is to blame.
        step: training step that was in progress.
        phase: of the step, as in `time/<phase>_s`; empty where it is not known.
        rank: of the learner that met it; None: it was met outside of the ranks.
    """

    kind: str
    told: str
    step: int
    phase: str = ""
    rank: int | None = None

    def __str__(self) -> str:
        phase = f", {self.phase}" if self.phase else ""
        rank = "" if self.rank is None else f", rank {self.rank}"
        return f"{self.kind} (step {self.step}{phase}{rank}): {self.told}"


class RunEnd(msgspec.Struct, frozen=True):
    """State of a run after its last finished `step`, at `unix_s`. `stopped`: it was asked to."""

    state: State
    step: int
    unix_s: float
    failure: Failure | None = None


def read_end(run_dir: Path) -> RunEnd | None:
    """None for a run of a version that wrote none, or a file that cannot be read."""
    try:
        return msgspec.json.decode((run_dir / FILE).read_bytes(), type=RunEnd)
    except (OSError, msgspec.DecodeError):
        return None


def write_end(run_dir: Path, end: RunEnd) -> None:
    """Replace `run.json`."""
    write_private(run_dir / FILE, msgspec.json.format(msgspec.json.encode(end)) + b"\n")


def outcome(run_dir: Path, *, complete: bool) -> tuple[str, str]:
    """The state of a run in words, and what went wrong; that is empty for one that trains, or did what it should.

    `complete`: all planned steps are in its metrics.
    """
    end = read_end(run_dir)
    if end is not None and end.failure is not None:
        return "failed", str(end.failure)
    if end is None or end.state == "finished":
        return ("complete", "") if complete else ("stopped early or still running", "")
    if end.state == "stopped":
        return "stopped as asked", ""
    if holder_of(run_dir / LEARNER_LOCK) is not None:
        return "running", ""
    reason = "its processes ended without a word: killed, or their machine went down; the same command goes on"
    return "ended without a word", reason


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
    kind, message = ("the job", error) if isinstance(error, str) else (type(error).__name__, str(error))
    failure = Failure(kind, message, step or so_far.step + 1, phase, rank)
    write_end(run_dir, RunEnd("failed", max(so_far.step, step - 1), time.time(), failure))
