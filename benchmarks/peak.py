"""The memory that Python's objects and arrays take at most while a piece of work lasts."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable


def peak_bytes(work: Callable[[], object]) -> int:
    """Most bytes in use during `work`, those of other threads too: the least of several counts is its own."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
