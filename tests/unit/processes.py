"""Processes that tests start, and how they are waited for."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path


def alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def wait_until_dead(pids: Iterable[int], patience_s: float = 5.0) -> bool:
    """True when none of them is alive within that time."""
    left, deadline = [*pids], time.monotonic() + patience_s
    while any(map(alive, left)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(alive, left))
