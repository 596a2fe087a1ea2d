"""Ratios of what several arms take, from measurements in rounds: robust least squares on logarithms.

`log value = arm + round + b . (chance - its mean) + noise`, where `chance` is what each measurement drew, such as the
length of answers. Every round has a level of its own, so drift of the host from round to round takes no part.

Huber's estimator: measurements further than `1.345 s` from the fit count with a weight of `1.345 s / distance`, where
`s` is the median distance over 0.6745. It needs 5% more measurements than least squares where the noise is normal, and
a few that a neighbour on the host has doubled hardly move it. Intervals are Student's 95% with Huber's covariance of
such estimators. Source: Huber 1964 and 1981, section 7.6.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from moe_trm.report.intervals import Interval, t_quantile

REACH = 1.345
"""Distances in units of the scale up to which a measurement has its full weight."""
NORMAL_MEDIAN = 0.6745
"""Median distance of normal noise from 0, in standard deviations."""
ITERATIONS = 100
NOTHING = 1e-12
"""Scale of logarithms below which the fit is exact."""
Array = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Measured:
    """One measurement: of which arm, in which round, what, and positive numbers that chance has moved it by."""

    arm: str
    round: int
    value: float
    chance: tuple[float, ...] = ()


@dataclass(frozen=True)
class Ratio:
    """What an arm takes over what the first one takes, with its 95% interval."""

    value: float
    interval: Interval


def ratios(found: Sequence[Measured], base: str, *, own_slopes: bool = False) -> dict[str, Ratio]:
    """By arm, its ratio to the arm `base`.

    With `own_slopes`, `b` is another one for each arm, as for programs that have little in common.

    Raises `ValueError` where there are too few measurements to know how far they scatter.
    """
    arms = [*(name for name in dict.fromkeys(one.arm for one in found) if name != base), base]
    rounds = sorted({one.round for one in found})
    of_arms = np.array([[float(one.arm == name) for name in arms] for one in found])
    of_rounds = np.array([[float(one.round == number) for number in rounds] for one in found])
    chance = np.log(np.array([one.chance for one in found], float).reshape(len(found), -1))
    chance -= chance.mean(0)
    if own_slopes:
        chance = (of_arms[:, :, None] * chance[:, None, :]).reshape(len(found), -1)
    design = np.hstack([of_arms[:, :-1], of_rounds, chance])
    effects, errors = _huber(design, np.log([one.value for one in found]))
    return {
        name: Ratio(math.exp(effect), (math.exp(effect - error), math.exp(effect + error)))
        for name, effect, error in zip(arms[:-1], effects, errors, strict=False)
    }


def ratio_of_kinds(found: Sequence[Measured], kinds: Mapping[str, str], kind: str, base: str) -> Ratio:
    """What the arms of one kind take over those of `base`, as a ratio of geometric means.

    Arms of one kind are equal but for chance that stays with an arm, such as where its memory lies. So the interval is
    Student's of two samples with one variance, made of the arms' own effects.

    Args:
        found: measurements of all arms.
        kinds: kind of each arm; at least two arms of each.
        kind: of those that are compared.
        base: the kind that they are compared with.
    """
    first = next(arm for arm in kinds if kinds[arm] == base)
    logs = {first: 0.0} | {arm: math.log(ratio.value) for arm, ratio in ratios(found, first).items()}
    samples = [np.array([logs[arm] for arm in kinds if kinds[arm] == of]) for of in (kind, base)]
    freedom = sum(len(sample) - 1 for sample in samples)
    variance = sum(float(np.square(sample - sample.mean()).sum()) for sample in samples) / freedom
    error = t_quantile(freedom) * math.sqrt(variance * sum(1 / len(sample) for sample in samples))
    effect = float(samples[0].mean() - samples[1].mean())
    return Ratio(math.exp(effect), (math.exp(effect - error), math.exp(effect + error)))


def _huber(design: Array, values: Array) -> tuple[Array, Array]:
    """Huber's coefficients and the half widths of their 95% intervals."""
    num, rank = len(values), int(np.linalg.matrix_rank(design))
    if num <= rank:
        raise ValueError(f"{num} measurements for {rank} unknowns: more rounds are needed")
    freedom = num - rank
    weights, scale = np.ones(num), 0.0
    for _ in range(ITERATIONS):
        roots = np.sqrt(weights)
        effects = np.linalg.lstsq(design * roots[:, None], values * roots)[0]
        left = values - design @ effects
        scale = float(np.median(np.abs(left))) / NORMAL_MEDIAN * math.sqrt(num / freedom)
        if scale < NOTHING:
            break
        before, weights = weights, np.minimum(1.0, REACH * scale / np.maximum(np.abs(left), NOTHING))
        if np.abs(weights - before).max() < 1e-9:
            break
    if scale < NOTHING:  # at least half of them are met exactly
        return effects, np.zeros_like(effects)
    bounded, inner = np.clip(left / scale, -REACH, REACH), np.abs(left) <= REACH * scale
    share = float(inner.mean())
    few = 1 + rank / num * (1 - share) / share
    variance = (few * scale / share) ** 2 * float(bounded @ bounded) / freedom
    # The diagonal of pinv(design.T @ design), as sums of squares: none of them is below 0 by rounding.
    errors = np.sqrt(variance * np.square(np.linalg.pinv(design)).sum(1))
    return effects, t_quantile(freedom) * errors
