"""Gradients estimated on two halves of the answers: inner products, cosines and progress without the estimates' noise.

Every product is of one half of one estimate with the other half of another. The halves are independent, so the noise of
an estimate adds nothing to its mean, not even to a squared norm. Answers of both halves may be the same for both
estimates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, variance

import numpy as np
from torch import Tensor


@dataclass(frozen=True)
class Halves:
    """A gradient `[P]`, estimated twice.

    Attributes:
        first, second: means over half of the answers each.
        num_answers: answers of both halves together.
    """

    first: Tensor
    second: Tensor
    num_answers: int

    def __sub__(self, other: Halves) -> Halves:
        return Halves(self.first - other.first, self.second - other.second, self.num_answers)

    @property
    def variance(self) -> float:
        """tr Cov of one answer's estimate, from how far the halves are apart."""
        return float((self.first - self.second).square().sum()) * self.num_answers / 4


def inner(a: Halves, b: Halves) -> float:
    """<E a, E b>, unbiased."""
    return (float(a.first @ b.second) + float(a.second @ b.first)) / 2


def cosine(a: Halves, b: Halves) -> float:
    """cos(E a, E b); NaN where the answers are too few to give a squared norm above 0."""
    squares = inner(a, a), inner(b, b)
    return inner(a, b) / math.sqrt(squares[0] * squares[1]) if min(squares) > 0 else math.nan


def progress_share(estimate: Halves, oracle: Halves, batch: int) -> float:
    """Progress <grad J, E g>^2 / (tr Cov(g) / batch + |Bias(g)|^2) of a batch, as a share of it on policy.

    On policy the mean is grad J, the variance is taken from `oracle`, and there is no bias.
    """
    squared_bias = max(0.0, inner(estimate - oracle, estimate - oracle))
    progress = inner(estimate, oracle) ** 2 / (estimate.variance / batch + squared_bias)
    return progress / (inner(oracle, oracle) ** 2 / (oracle.variance / batch))


def student_p(differences: Sequence[float]) -> float:
    """Two-sided p of Student's t for a mean of 0.

    With n - 1 degrees of freedom nu and t = sqrt(nu) tan(a), the density of the angle a is proportional to
    cos(a)^(nu - 1).
    """
    freedom, error = len(differences) - 1, math.sqrt(variance(differences) / len(differences))
    if error == 0:
        return 1.0 if fmean(differences) == 0 else 0.0
    reached = math.atan(abs(fmean(differences)) / error / math.sqrt(freedom))
    tail, half = (
        np.trapezoid(np.cos(angles) ** (freedom - 1), angles)
        for angles in (np.linspace(low, math.pi / 2, 20_001) for low in (reached, 0.0))
    )
    return float(tail / half)


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """p-values corrected for their number: the k-th smallest of m times m - k + 1, never below a smaller one, at most
    1. Source: Holm 1979.
    """
    corrected, least = dict[str, float](), 0.0
    for rank, name in enumerate(sorted(p_values, key=lambda name: p_values[name])):
        least = max(least, min(1.0, p_values[name] * (len(p_values) - rank)))
        corrected[name] = least
    return corrected
