"""A learner rank that also records its live objects and memory after every step.

Run as `python -m tests.integration.counting_rank FILE CONFIG [key=value ...]`.

`FILE` gets one JSON object per step of the first rank, once cycles are collected. `objects`: number of live objects of
each kind. `in_use_bytes`: memory that malloc has given out and not got back. Unlike the resident set, it does not count
what the allocator keeps for later.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from launch import learner, train
from moe_trm.observe.build import open_sinks
from moe_trm.observe.sinks import Sink


class MallocInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`; bytes mapped one by one (`hblkhd`) are not among those of its arenas (`uordblks`)."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in [
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        ]
    ]


def in_use_bytes() -> int:
    """Of the whole process."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = MallocInfo
    info = mallinfo2()
    return int(info.uordblks + info.hblkhd)


class Census(Sink):
    """The living objects that Python's collector knows of, by type."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, step: int, metrics: Mapping[str, float | str]) -> None:
        gc.collect()
        kinds = Counter(type(each).__name__ for each in gc.get_objects())
        with self._path.open("a") as file:
            file.write(json.dumps({"step": step, "in_use_bytes": in_use_bytes(), "objects": kinds}) + "\n")


def main(path: Path, arguments: list[str]) -> int:
    @contextmanager
    def with_census(*given: Any, **named: Any) -> Iterator[list[Sink]]:
        with open_sinks(*given, **named) as sinks:
            yield [*sinks, Census(path)]

    with patch.object(learner, "open_sinks", with_census):
        return train.main(arguments)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
