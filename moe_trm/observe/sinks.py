"""Destinations of a run's metrics. `metrics.jsonl` is always written."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import orjson

from moe_trm.errors import RunError
from moe_trm.runtime.private import append_private, open_private

if TYPE_CHECKING:
    from moe_trm.corrections.evidence import Correction, Evidence
    from moe_trm.types import ServerState, TrainRow

_log = logging.getLogger(__name__)


class Sink:
    """The protocol of everything that watches a run, on its first rank.

    What a sink does not care about it inherits as nothing.
    """

    def enter(self, phase: str) -> None:
        """A phase of a step begins (`wait`, `score`, `update`, ...)."""

    def servers(self, states: Sequence[ServerState]) -> None:
        """Called about twice a second while the learner waits for the rollout side."""

    def judged(self, rows: Sequence[TrainRow], evidence: Evidence, correction: Correction) -> None:
        """Called after an update has judged a micro-batch of this rank.

        `evidence` and `correction` are `[B, R]`, one row per element of `rows`.
        """

    def write(self, step: int, metrics: Mapping[str, float | str]) -> None:
        """A step has ended: metric names to numbers, and `verdict` and `verdict/config` to text."""

    def failed(self, error: BaseException) -> None:
        """The run ends with this error; `close` follows."""

    def close(self) -> None:
        """The run has ended, for whatever reason."""


class JsonLines(Sink):
    """`metrics.jsonl`: one object per step, written at once so that a killed run keeps its metrics.

    Non-finite values become null. `time/unix_s` says when the line was written. Raises `RunError` when it cannot be: a
    run whose steps cannot be seen is stopped.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, append_private(path, buffering=0)

    def write(self, step: int, metrics: Mapping[str, float | str]) -> None:
        row = {"step": step, "time/unix_s": time.time(), **metrics}
        line = orjson.dumps(row, option=orjson.OPT_SORT_KEYS) + b"\n"
        try:
            complete = self._file.write(line) == len(line)
            reason = "the disk is full"
        except OSError as error:
            complete, reason = False, str(error)
        if not complete:
            raise RunError(
                "the metrics of this step cannot be written",
                where=str(self._path),
                got=reason,
                expected=f"room for {len(line)} bytes",
                fix="Make room; the same command then goes on from the newest checkpoint.",
            )

    def close(self) -> None:
        self._file.close()


def keep_steps(path: Path, last: int) -> None:
    """Cut `metrics.jsonl` after the line of step `last`. So no step is in it twice."""
    if not path.exists():
        return
    end = 0
    with open(open_private(path, os.O_RDWR), "r+b") as file:
        for line in file:
            # A killed run may have left half a line at the end.
            if not line.endswith(b"\n") or orjson.loads(line)["step"] > last:
                break
            end += len(line)
        file.truncate(end)


class Guarded(Sink):
    """A sink whose failure must not end a run: it is said once, with the reason, and the sink is not used again."""

    def __init__(self, sink: Sink, name: str) -> None:
        self._sink: Sink | None = sink
        self._name = name

    def enter(self, phase: str) -> None:
        self._try(lambda sink: sink.enter(phase))

    def servers(self, states: Sequence[ServerState]) -> None:
        self._try(lambda sink: sink.servers(states))

    def judged(self, rows: Sequence[TrainRow], evidence: Evidence, correction: Correction) -> None:
        self._try(lambda sink: sink.judged(rows, evidence, correction))

    def write(self, step: int, metrics: Mapping[str, float | str]) -> None:
        self._try(lambda sink: sink.write(step, metrics))

    def failed(self, error: BaseException) -> None:
        self._try(lambda sink: sink.failed(error))

    def close(self) -> None:
        self._try(lambda sink: sink.close())

    def _try(self, tell: Callable[[Sink], None]) -> None:
        if self._sink is not None:
            try:
                tell(self._sink)
            except Exception as error:  # noqa: BLE001 - whatever a tracker raises, the run goes on
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._sink = None
        _log.warning(
            "sink %s failed and is not used any more; metrics.jsonl goes on (%s: %s)",
            self._name,
            type(error).__name__,
            error,
        )
