"""Metrics that may be added over micro-batches, ranks and steps. After that they are finished into readable numbers.

A metric is a set of 0-d float64 tensors under `NAME:ROLE`. The roles of one name determine the result:

| roles | finished as |
|---|---|
| `sum`, `count` | `NAME` = sum / count |
| `sum`, `squared`, `count` | `NAME_mean`, `NAME_std` |
| `sum`, `square`, `count` | `NAME_mean`, `NAME_std`, `NAME_eff_sample_size` = mean^2 / mean of squares, in (0, 1] |
| `x`, `y`, `xx`, `yy`, `xy`, `count` | `NAME` = Pearson correlation |
| and `slope` | `NAME_slope` = slope of y by x, `NAME_slope_error` = standard error of its logarithm; of 3 pairs on |
| `max` or `min` | `NAME` = the largest or smallest value: compared, not added, by `add` and by `Learner.reduce` |
| `bin0`, `bin1`, ... | `NAME_p95`, the 95th percentile of a histogram |

A histogram has two bins for each power of two, from 2^-20 (about 1e-6) up. A percentile is interpolated within its
bin, so it is right to a few per cent where values lie densely. What is below the first bin counts as 0, what is beyond
the last as its edge.

The names depend on configuration and shapes, never on values: every rank has the same keys, an empty micro-batch
included. A name with count 0 is left out of the result.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

Summable = dict[str, Tensor]
LOWEST, PERCENTILE = -20, 0.95
"""Power of two at which histograms begin, and what is read from them."""


def mean(name: str, values: Tensor, mask: Tensor) -> Summable:
    """The mean of `values` where `mask` is True (same shape); values elsewhere may be anything."""
    return {f"{name}:sum": _total(values, mask), f"{name}:count": count(mask)}


def fraction(name: str, selected: Tensor, mask: Tensor) -> Summable:
    """The share of `mask` positions at which the bool `selected` is True."""
    return {f"{name}:sum": count(selected & mask), f"{name}:count": count(mask)}


def fractions(selections: Mapping[str, Tensor], mask: Tensor) -> Summable:
    """`fraction` of several, by their names."""
    sums = (torch.stack([*selections.values()]) & mask).flatten(1).count_nonzero(dim=1).double()
    total = count(mask)
    return {
        key: value
        for name, part in zip(selections, sums.unbind(), strict=True)
        for key, value in ((f"{name}:sum", part), (f"{name}:count", total))
    }


def count(selected: Tensor) -> Tensor:
    """Number of True positions, 0-d float64."""
    return selected.count_nonzero().double()  # many times faster than a sum of bool


def moments(name: str, values: Tensor, mask: Tensor) -> Summable:
    """Mean, standard deviation and effective sample size of `values` where `mask` is True."""
    return mean(name, values, mask) | {f"{name}:square": _total(values.detach() ** 2, mask)}


def maximum(name: str, values: Tensor) -> Summable:
    """The largest of `values`; finished into nothing when there is none. NaN wins."""
    return {f"{name}:max": highest(values)}


def highest(values: Tensor) -> Tensor:
    """The largest of `values` as a 0-d float64, -infinity when there is none."""
    values = values.detach()
    return values.amax().double() if values.numel() else values.new_full((), -math.inf, dtype=torch.float64)


def lowest(values: Tensor) -> Tensor:
    """The smallest of `values` as a 0-d float64, infinity when there is none."""
    values = values.detach()
    return values.amin().double() if values.numel() else values.new_full((), math.inf, dtype=torch.float64)


def bins(values: Tensor, top: int) -> Tensor:
    """Number of `values` in each bin of a histogram that ends at 2^`top`, `[bins]` float64. NaN is in the last one.

    The upper bits of a float32, its exponent and the first bit of its mantissa, are the number of its bin.
    """
    num = 2 * (top - LOWEST) + 2
    bits = values.detach().float().clamp(min=0).abs().view(torch.int32) >> 22
    index = (bits - (2 * (LOWEST + 127) - 1)).clamp_(0, num - 1)
    return torch.bincount(index, minlength=num).double()


def histogram(name: str, counts: Tensor) -> Summable:
    """The roles of a histogram of `counts` (see `bins`)."""
    return {f"{name}:bin{place}": count for place, count in enumerate(counts.unbind())}


def compared(name: str) -> bool:
    """True when the metric `name` is a maximum or minimum, which is compared where others are added."""
    return name.endswith((":max", ":min"))


def add(parts: Iterable[Mapping[str, Tensor]]) -> Summable:
    """The sum of several dicts of summable metrics, key by key; of maxima and minima the largest and the smallest."""
    total: Summable = {}
    for part in parts:
        for key, value in part.items():
            total[key] = _joined(key, total[key], value) if key in total else value
    return total


def _joined(key: str, first: Tensor, second: Tensor) -> Tensor:
    if key.endswith(":max"):
        return torch.maximum(first, second)
    return torch.minimum(first, second) if key.endswith(":min") else first + second


def finalize(metrics: Mapping[str, Tensor | float]) -> dict[str, float]:
    """Finish summed metrics into plain numbers (see the table above). Keys without a role are passed on as they are."""
    roles: dict[str, dict[str, float]] = {}
    for key, value in metrics.items():
        name, _, role = key.partition(":")
        roles.setdefault(name, {})[role] = float(value)
    result: dict[str, float] = {}
    for name, parts in roles.items():
        result |= _finish(name, parts)
    return result


def _total(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values.detach(), 0.0).sum(dtype=torch.float64)


def _finish(name: str, parts: dict[str, float]) -> dict[str, float]:
    if "" in parts:
        return {name: parts[""]}
    if "bin0" in parts:
        counts = [parts.pop(f"bin{place}") for place in range(sum(role.startswith("bin") for role in parts))]
        return _finish_percentile(name, counts) | (_finish(name, parts) if parts else {})
    extreme = parts.get("max", parts.get("min"))
    if extreme is not None:
        return {} if math.isinf(extreme) and (extreme < 0) == ("max" in parts) else {name: extreme}
    count = parts["count"]
    if count == 0:
        return {}
    if "xy" in parts:
        return _finish_correlation(name, parts, count)
    average = parts["sum"] / count
    if "square" not in parts and "squared" not in parts:
        return {name: average}
    square = parts.get("square", parts.get("squared", 0.0)) / count
    moments = {f"{name}_mean": average, f"{name}_std": math.sqrt(max(square - average**2, 0.0))}
    if "squared" in parts:
        return moments
    return moments | {
        f"{name}_eff_sample_size": average**2 / square if square > 0 else 1.0,
    }


def _finish_percentile(name: str, counts: Sequence[float]) -> dict[str, float]:
    target_count = PERCENTILE * math.fsum(counts)
    if not target_count:
        return {}
    # Whole numbers: their sums are exact in any order.
    reached = [0.0, *accumulate(counts)]
    place = next(i for i, upto in enumerate(reached[1:]) if upto >= target_count)
    below = reached[place]
    if place == 0:
        return {f"{name}_p95": 0.0}
    within = (target_count - below) / counts[place] if place < len(counts) - 1 else 0.0
    low, high = (2.0 ** (LOWEST + bound // 2) * (1 + bound % 2 / 2) for bound in (place - 1, place))
    return {f"{name}_p95": low + within * (high - low)}


def _finish_correlation(name: str, parts: Mapping[str, float], count: float) -> dict[str, float]:
    x, y = parts["x"] / count, parts["y"] / count
    var_x, var_y = parts["xx"] / count - x * x, parts["yy"] / count - y * y
    # Below rounding of the sums themselves there is no spread to correlate; identical constants count as agreeing.
    if min(var_x, var_y) <= 1e-14:
        return {name: 1.0} if abs(x - y) <= 1e-7 and max(var_x, var_y) <= 1e-14 else {}
    covariance = parts["xy"] / count - x * y
    correlation = covariance / math.sqrt(var_x * var_y)
    if "slope" not in parts or count < 3 or correlation == 0:
        return {name: correlation}
    error = math.sqrt(max(1 / correlation**2 - 1, 0.0) / (count - 2))
    return {name: correlation, f"{name}_slope": covariance / var_x, f"{name}_slope_error": error}
