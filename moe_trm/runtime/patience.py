"""The one home of patience: limits of waiting that a loaded machine stretches."""

from __future__ import annotations

import os

MOST = 10.0


def patient(seconds: float) -> float:
    """`seconds` on a machine with a processor to spare; up to `MOST` times as many where processes queue for one.

    It is measured by the load of the last minute over the number of processors. It is for waits that end in a judgement
    ("it is gone"), not for limits that the user sets.
    """
    return seconds * min(MOST, max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)))
