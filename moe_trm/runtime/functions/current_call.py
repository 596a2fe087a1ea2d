"""The call that a process executes now, in memory that its parent can read even while the process is stuck or dead."""

from __future__ import annotations

import mmap
import struct
import time

_CELL = struct.Struct("<Qd")
SIZE = _CELL.size


class CurrentCall:
    """One cell: the number of the running call and its start, by `time.monotonic`, which all processes of a machine
    share.

    `descriptor`: of a file of `SIZE` bytes, open in both processes.
    """

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, SIZE)

    def begin(self, number: int) -> None:
        """The code of call `number` runs from now on."""
        _CELL.pack_into(self._memory, 0, number, time.monotonic())

    def end(self) -> None:
        """No call's code runs: all wait, or there are none."""
        _CELL.pack_into(self._memory, 0, 0, 0.0)

    def read(self) -> tuple[int, float]:
        """The call (0: none) and the second at which it began.

        A cell that is being written may be read half: look twice, and take a start of 0 for none.
        """
        number, since = _CELL.unpack_from(self._memory)
        return int(number), float(since)

    def close(self) -> None:
        self._memory.close()
