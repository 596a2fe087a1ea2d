"""CPU seconds of the two sides of a job on this machine, the servers' and the learner's, over time."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Literal

import numpy as np
import psutil

from benchmarks.processes import role

PAUSE_S = 0.2
Side = Literal["server", "learner"]


class SideClock:
    """CPU seconds of each side at the moments when they were looked at."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._totals: dict[Side, list[float]] = {"server": [], "learner": []}
        self._last: dict[psutil.Process, tuple[Side, float]] = {}

    def look(self) -> None:
        """Note the CPU seconds of every process of this one's jobs; the seconds of ended ones stay."""
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                if (previous := self._last.get(process)) is None:
                    process_side = side_of(role(process.cmdline()))
                    if process_side is None:
                        continue
                else:
                    process_side = previous[0]
                spent = process.cpu_times()
                self._last[process] = process_side, spent.user + spent.system
        self._times.append(time.time())
        for side, totals in self._totals.items():
            totals.append(sum(seconds for process_side, seconds in self._last.values() if process_side == side))

    def between(self, side: Side, begin: float, end: float) -> float:
        """CPU seconds of a side between two moments (Unix time), by straight lines between looks."""
        low, high = np.interp([begin, end], self._times, self._totals[side])
        return float(high - low)


def side_of(name: str) -> Side | None:
    """The side of a process with this role (`benchmarks.processes.role`)."""
    if name == "learner rank":
        return "learner"
    return "server" if "SGLang" in name or name in ("rollout controller", "reward function") else None


@contextmanager
def watched() -> Iterator[SideClock]:
    """A clock that looks every `PAUSE_S` seconds while the block runs."""
    clock, over = SideClock(), threading.Event()

    def watch() -> None:
        while not over.wait(PAUSE_S):
            clock.look()

    thread = threading.Thread(target=watch, name="side clock", daemon=True)
    thread.start()
    try:
        yield clock
    finally:
        over.set()
        thread.join()
