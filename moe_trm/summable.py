"""Metrics that may be added: over micro-batches, over ranks, over steps. Only then are they finished into the numbers people read.

A metric travels as 0-d float64 tensors under `NAME:ROLE`. The roles of one name say what it becomes:

| roles | finished as |
|---|---|
| `sum`, `count` | `NAME` = sum / count |
| `sum`, `square`, `count` | `NAME_mean`, `NAME_std`, `NAME_eff_sample_size` = mean^2 / mean of squares, in (0, 1] |
| `x`, `y`, `xx`, `yy`, `xy`, `count` | `NAME` = Pearson correlation |

Which names exist depends on configuration and shapes, never on values: every rank has the same keys, an empty
micro-batch included. A name with count 0 is left out of the result: there is nothing to say about nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

Summable = dict[str, Tensor]


def mean(name: str, values: Tensor, mask: Tensor) -> Summable:
    """The mean of `values` where `mask` is True (same shape); values elsewhere may be anything."""
    return {f"{name}:sum": _total(values, mask), f"{name}:count": mask.sum(dtype=torch.float64)}


def fraction(name: str, chosen: Tensor, mask: Tensor) -> Summable:
    """The share of `mask` positions at which the bool `chosen` is True."""
    return {f"{name}:sum": (chosen & mask).sum(dtype=torch.float64), f"{name}:count": mask.sum(dtype=torch.float64)}


def moments(name: str, values: Tensor, mask: Tensor) -> Summable:
    """Mean, standard deviation and effective sample size of `values` where `mask` is True."""
    return mean(name, values, mask) | {f"{name}:square": _total(values.detach() ** 2, mask)}


def correlation(name: str, x: Tensor, y: Tensor, count: Tensor) -> Summable:
    """Pearson correlation of `x` and `y` over `count` positions; both must be 0 at all others."""
    # Variances are differences of sums: products need the full 53 bits.
    x, y = x.detach().double().flatten(), y.detach().double().flatten()
    sums = {"x": x.sum(), "y": y.sum(), "xx": x @ x, "yy": y @ y, "xy": x @ y, "count": count}
    return {f"{name}:{role}": value for role, value in sums.items()}


def add(parts: Iterable[Mapping[str, Tensor]]) -> Summable:
    """The sum of several dicts of summable metrics, key by key."""
    total: Summable = {}
    for part in parts:
        for key, value in part.items():
            total[key] = total[key] + value if key in total else value
    return total


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


def _finish(name: str, parts: Mapping[str, float]) -> dict[str, float]:
    if "" in parts:
        return {name: parts[""]}
    count = parts["count"]
    if count == 0:
        return {}
    if "xy" in parts:
        return _finish_correlation(name, parts, count)
    average = parts["sum"] / count
    if "square" not in parts:
        return {name: average}
    square = parts["square"] / count
    return {
        f"{name}_mean": average,
        f"{name}_std": math.sqrt(max(square - average**2, 0.0)),
        f"{name}_eff_sample_size": average**2 / square if square > 0 else 1.0,
    }


def _finish_correlation(name: str, parts: Mapping[str, float], count: float) -> dict[str, float]:
    x, y = parts["x"] / count, parts["y"] / count
    var_x, var_y = parts["xx"] / count - x * x, parts["yy"] / count - y * y
    # Below rounding of the sums themselves there is no spread to correlate; identical constants count as agreeing.
    if min(var_x, var_y) <= 1e-14:
        return {name: 1.0} if abs(x - y) <= 1e-7 and max(var_x, var_y) <= 1e-14 else {}
    return {name: (parts["xy"] / count - x * y) / math.sqrt(var_x * var_y)}
