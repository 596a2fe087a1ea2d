"""Test for growth of a repeatedly measured quantity over the steps of a run: a slope, its error and one word.

Memory grows in jumps, and successive measurements are correlated. So neither the number of measurements nor their
distance from a line gives the error of a slope. The steps are therefore cut into blocks of equal length. The slope is
the mean difference of the medians of successive blocks; its error comes from the spread of these differences. One jump
is then no trend. The first quarter of the steps is warm-up and is not used.

The words:

- flat: over the second half of the run, the 95% interval of the slope holds 0 or less, or lies below `NEGLIGIBLE`.
- levels off: not flat, but the fit on the logarithm of the step leaves less than half of the squared residuals of the
  fit on the step. Memory that an allocator keeps and reuses behaves like this, because it touches new pages ever more
  rarely. A leak is a line.
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
    """Growth of `values`, in bytes, over `steps`, both `[N]`; None when a block of the run has no measurement.

    Args:
        steps: the last finished step at each measurement, ascending.
        values: the measurements.
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
    """Sum of squared residuals of the least-squares line through `values` over `at`."""
    centred, values = at - at.mean(), values - values.mean()
    rest = values - centred * float(centred @ values) / float(centred @ centred)
    return float(rest @ rest)
