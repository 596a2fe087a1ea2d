"""Does a quantity that was looked at again and again during a run grow with the steps? A slope with its error, and one word.

Memory goes in jumps, and a look is like the look before it, so neither the number of looks nor their distance from a line says how sure a
slope is. The steps are therefore cut into blocks of equal length; the slope is the mean of what the blocks' medians gain from one to the
next, and its error comes from how much those gains differ. One jump is then no trend. The first quarter of the steps is warm-up and takes
no part.

What is flat, grows or levels off:

- flat: over the second half of the run, the 95% interval of the slope holds 0 or less, or lies below `NEGLIGIBLE`.
- levels off: not flat, but the logarithm of the step leaves less than half of the residuals that the step itself leaves. So does memory
  that an allocator was given once and reuses: it touches a page for the first time ever more rarely. A leak is a line.
- grows: neither.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Verdict = Literal["flat", "levels off", "grows"]
Floats = NDArray[np.float64]

WARM_UP = 0.25
BLOCKS = 10
STUDENT_T = 2.306
"""Two-sided 95% of Student's t with `BLOCKS` - 2 degrees of freedom: the blocks have one gain less than they are."""
BENDS = 0.5
NEGLIGIBLE = 512.0
"""Bytes a step that no run will notice: half a gigabyte in a million steps."""


@dataclass(frozen=True)
class Line:
    """A slope per step, and its standard error."""

    slope: float
    error: float

    @property
    def low(self) -> float:
        return self.slope - STUDENT_T * self.error

    @property
    def high(self) -> float:
        return self.slope + STUDENT_T * self.error


@dataclass(frozen=True)
class Growth:
    """`settled`: the line after the warm-up; `late`: over the second half alone."""

    settled: Line
    late: Line
    verdict: Verdict


def growth(steps: Floats, values: Floats, num_steps: int) -> Growth | None:
    """How `values`, in bytes, went with `steps`, `[N]` both; None where a block of the run was not looked at.

    Args:
        steps: the last finished step at each look, ascending.
        values: what was seen.
        num_steps: of the run.
    """
    settled = _blocks(steps, values, WARM_UP * num_steps, num_steps)
    late = _blocks(steps, values, num_steps / 2, num_steps)
    if settled is None or late is None:
        return None
    line, late_line = _line(*settled), _line(*late)
    if late_line.low <= 0 or late_line.high < NEGLIGIBLE:
        verdict: Verdict = "flat"
    else:
        at, medians = settled
        bends = _residuals(np.log(at), medians) < BENDS * _residuals(at, medians)
        verdict = "levels off" if bends else "grows"
    return Growth(line, late_line, verdict)


def _blocks(steps: Floats, values: Floats, first: float, last: float) -> tuple[Floats, Floats] | None:
    """Mean step and median value of each block between two steps; None where one is empty."""
    edges = np.linspace(first, last, BLOCKS + 1)
    block = np.minimum(np.searchsorted(edges, steps, side="right") - 1, BLOCKS - 1)
    parts = [values[block == number] for number in range(BLOCKS)]
    if not all(part.size for part in parts):
        return None
    at = np.array([steps[block == number].mean() for number in range(BLOCKS)])
    return at, np.array([np.median(part) for part in parts])


def _line(at: Floats, values: Floats) -> Line:
    gains = np.diff(values) / np.diff(at)
    return Line(float(gains.mean()), float(gains.std(ddof=1) / np.sqrt(len(gains))))


def _residuals(at: Floats, values: Floats) -> float:
    """What the best line through `values` over `at` leaves of them, squared and summed."""
    centred, values = at - at.mean(), values - values.mean()
    rest = values - centred * float(centred @ values) / float(centred @ centred)
    return float(rest @ rest)
