"""Seconds per phase of a step."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from moe_trm.observe.sinks import Sink


class Phases:
    """Wall-clock seconds by phase name; `take` reads and clears them. `sinks` are notified when a phase begins."""

    def __init__(self, sinks: Sequence[Sink] = ()) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._sinks = sinks

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        for sink in self._sinks:
            sink.enter(name)
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] += time.perf_counter() - start

    def take(self) -> dict[str, float]:
        """`time/<phase>_s` since the last call, and `time/learner_idle_share`: the share of the step spent waiting.

        The learner waits for samples.
        """
        taken = {f"time/{name}_s": seconds for name, seconds in self._seconds.items()}
        if {"wait", "step"} <= self._seconds.keys():
            taken["time/learner_idle_share"] = self._seconds["wait"] / self._seconds["step"]
        self._seconds.clear()
        return taken
