"""Seconds per phase of a step."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class Phases:
    """Wall-clock seconds by phase name; `take` reads and clears them."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] += time.perf_counter() - start

    def take(self) -> dict[str, float]:
        """`time/<phase>_s` since the last call."""
        taken = {f"time/{name}_s": seconds for name, seconds in self._seconds.items()}
        self._seconds.clear()
        return taken
