"""The empirical quantile that thresholds are chosen by. Shape letters: N units, D statistics of a rule."""

from __future__ import annotations

import math

from torch import Tensor


def common_quantile(statistics_ND: Tensor, rate: float) -> Tensor:
    """The quantile of each statistic, `[D]`, at one common place, above which lies at most `rate` of the units.

    Each is a value that occurred. Needs at least one unit, and no NaN.
    """
    ascending, order = statistics_ND.sort(dim=0, stable=True)
    # A unit is rejected when any of its statistics is above its threshold: its highest place in any column counts.
    place = order.argsort(dim=0).amax(dim=1).sort().values
    return ascending[place[math.ceil((len(place) - 1) * (1 - rate))]]
