"""The memory that a piece of work takes at most: of Python's objects and arrays, and of this process (Linux)."""

from __future__ import annotations

import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path


def peak_bytes(work: Callable[[], object]) -> int:
    """Most bytes in use during `work`, also by other threads: the least of several counts is its own."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def forget_peak() -> int:
    """Begin the peak of this process (`VmHWM`) anew; else the parent's would count. Returns the bytes it has now."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return status_bytes("VmRSS")


def status_bytes(field: str) -> int:
    """Bytes of a line of `/proc/self/status`."""
    match = re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert match is not None, f"/proc/self/status has {field}"
    return 1024 * int(match.group(1))
