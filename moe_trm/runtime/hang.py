"""Judgement of a process that is looked at again and again: well, busy, or hung. Pure.

On a loaded machine a process may say nothing for a long time and be well. It is then computing, or waiting for a
processor. One that hangs does neither: it sleeps or is stopped, although something is there for it to answer. The other
kind of hang computes for ever and comes to no end.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from moe_trm.runtime.activity import stat_fields

Health = Literal["well", "busy", "hung"]

WAITING = "RD"
"""States of Linux in which a process computes or waits for a processor or a disk."""


@dataclass(frozen=True)
class Observation:
    """One look at a process: whether its event loop came round since the last, the processor time it has used, and
    Linux's letter of its state (R runs or wants to, D waits for a disk, S sleeps, T is stopped).
    """

    answered: bool
    ticks: int
    state: str


class HangDetector:
    """The looks at one process.

    Args:
        silent_looks: looks in turn at a process that neither answers nor computes, after which it hangs.
        stuck_looks: the same for one that computes.
    """

    def __init__(self, silent_looks: int, stuck_looks: int) -> None:
        self._silent_looks, self._stuck_looks = silent_looks, stuck_looks
        self._ticks = -1
        self._silent = self._stuck = 0

    def judge(self, look: Observation) -> Health:
        """The judgement of this look, after those before it."""
        computed, self._ticks = look.ticks != self._ticks or look.state in WAITING, look.ticks
        self._stuck = 0 if look.answered else self._stuck + 1
        self._silent = 0 if look.answered or computed else self._silent + 1
        if look.answered:
            return "well"
        hung = self._silent >= self._silent_looks or self._stuck >= self._stuck_looks
        return "hung" if hung else "busy"


def state_of(process: int) -> tuple[int, str]:
    """Processor ticks of a process, and the state of its busiest thread. Raises `OSError` where there is none."""
    ticks = [int(field) for field in stat_fields(Path(f"/proc/{process}/stat"))[11:13]]
    states = [stat_fields(path)[0] for path in Path(f"/proc/{process}/task").glob("*/stat")]
    return sum(ticks), next((state for state in states if state in WAITING), states[0] if states else "Z")
