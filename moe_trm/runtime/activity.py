"""Signs that a process works although it says nothing: it computes, waits for a processor, or reads pages from disk.

On a loaded machine a process may answer late and be well. One that is stopped, or waits for what never comes, shows
none of these signs.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

BUSY_SHARE = 0.02
"""Part of a time that the threads of a busy process spend computing or waiting for a processor, at the least."""


@dataclass(frozen=True)
class Activity:
    """Counts of a process since its start.

    Attributes:
        seconds: in which its threads computed or waited for a processor, summed.
        page_reads: pages of memory that it had to wait for the disk for.
    """

    seconds: float
    page_reads: int

    def busy_since(self, earlier: Activity, seconds: float) -> bool:
        """True for a process that worked in the `seconds` since the look `earlier`."""
        return self.page_reads > earlier.page_reads or self.seconds - earlier.seconds > BUSY_SHARE * seconds


def activity_of(process: int) -> Activity:
    """The counts of one process, by Linux. Raises `OSError` where it or its counts are not there.

    A kernel that does not count waiting time counts computing time.
    """
    fields = stat_fields(Path(f"/proc/{process}/stat"))
    ticks, waited_ns = int(fields[11]) + int(fields[12]), 0
    for counts in Path(f"/proc/{process}/task").glob("*/schedstat"):
        with suppress(OSError):  # a thread that has just ended
            waited_ns += int(counts.read_text().split()[1])
    return Activity(ticks / os.sysconf("SC_CLK_TCK") + waited_ns / 1e9, int(fields[9]))


def stat_fields(path: Path) -> list[str]:
    """Fields of a `stat` file of Linux, from the state on. psutil has neither page reads nor the states of threads.

    The command's name before them may have blanks itself. Raises `OSError` where there is no such process or thread.
    """
    return path.read_text().rpartition(")")[2].split()
