"""95% intervals over seeds, of a mean and of paired differences. Needs nothing but Python.

A few seeds leave little to resample. The bootstrap of three differences is hardly more than their range, which leaves
0 out in one case of four where there is no difference. Student's t is honest there, but holds for normal values. So
the interval of a paired difference is the wider of both on each side.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement, product
from statistics import mean, variance

T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""Two-sided 95% quantiles of Student's t for 1, 2, ... degrees of freedom; after the last, the last."""
NORMAL_95 = 1.96
"""Two-sided 95% quantile of the normal distribution."""
MOST_RESAMPLED_EXACTLY = 9
"""Values of which every resample is counted; of more, `RESAMPLES` are drawn."""
MOST_FLIPPED_EXACTLY = 14
RESAMPLES = 20_000

Interval = tuple[float, float]


def t_quantile(degrees: int) -> float:
    """Two-sided 95% quantile of Student's t; for more than 15 degrees the quantile of 15, which is wider."""
    return T_95[min(degrees, len(T_95)) - 1]


def around_mean(values: Sequence[float]) -> Interval | None:
    """Student's interval `m -+ t s / sqrt(n)` of the mean; None of fewer than two values."""
    if len(values) < 2:
        return None
    reach = t_quantile(len(values) - 1) * math.sqrt(variance(values) / len(values))
    return mean(values) - reach, mean(values) + reach


def welch(first: Sequence[float], other: Sequence[float]) -> Interval | None:
    """95% interval of `mean(other) - mean(first)` of values that are not paired; None where a side has fewer than two.

    With v = s^2 / n of each side, degrees of freedom (v1 + v2)^2 / (v1^2 / (n1 - 1) + v2^2 / (n2 - 1)), rounded down.
    Source: Welch 1947, Satterthwaite 1946.
    """
    if min(len(first), len(other)) < 2:
        return None
    parts = [(variance(values) / len(values), len(values) - 1) for values in (first, other)]
    error = sum(part for part, _ in parts)
    degrees = error**2 / sum(part**2 / free for part, free in parts) if error else len(first) + len(other) - 2
    reach = t_quantile(int(degrees + 1e-9)) * math.sqrt(error)
    difference = mean(other) - mean(first)
    return difference - reach, difference + reach


def binomial_reach(pairs: Sequence[tuple[float, float]], answers: int) -> float:
    """Half of the narrowest honest 95% interval of a mean difference of shares of right answers.

    A share p of `answers` answers has the variance p (1 - p) / answers, so the mean of k differences has at least
    1.96 sqrt(sum(p (1 - p) + q (1 - q)) / answers) / k, if answers to the same prompt are independent. An interval over
    few seeds can be narrower by luck.
    """
    spread = sum(share * (1 - share) for pair in pairs for share in pair) / answers
    return NORMAL_95 * math.sqrt(spread) / len(pairs)


def repetition_noise(pairs: Sequence[tuple[float, float]]) -> float:
    """Standard deviation of a run around others of the same settings and seed: sqrt(sum d^2 / 2 k) of k pairs."""
    return math.sqrt(math.fsum((second - first) ** 2 for first, second in pairs) / (2 * len(pairs)))


def bootstrap(values: Sequence[float]) -> Interval:
    """Percentile interval of the mean over resamples with replacement.

    Exact for up to `MOST_RESAMPLED_EXACTLY` values, else over `RESAMPLES` draws with a fixed seed. Source: Efron 1979.
    """
    tail = 0.025
    means = sorted(_resampled(values))
    return _first_beyond(means, tail), -_first_beyond([(-value, weight) for value, weight in reversed(means)], tail)


def sign_flip_p(differences: Sequence[float]) -> float:
    """Two-sided p of the exact paired permutation test: each difference might as well have the other sign.

    With `n` differences it is never below `2 / 2^n`: 0.25 for three. Source: Fisher 1935.
    """
    num, seen = len(differences), abs(math.fsum(differences))
    signs: Sequence[Sequence[int]]
    if num <= MOST_FLIPPED_EXACTLY:
        signs = list(product((1, -1), repeat=num))
    else:
        draw = random.Random(0)
        signs = [(1,) * num, *([draw.choice((1, -1)) for _ in range(num)] for _ in range(RESAMPLES))]
    slack = 1e-12 * max(map(abs, differences), default=0.0)
    sums = [math.fsum(sign * value for sign, value in zip(flips, differences, strict=True)) for flips in signs]
    return sum(abs(total) >= seen - slack for total in sums) / len(sums)


@dataclass(frozen=True)
class PairedDifference:
    """Differences of pairs (other minus first) and what they show.

    `interval`: 95%, the wider of Student's and the bootstrap's on each side; None for a single pair. `p`: of the paired
    permutation test.
    """

    differences: tuple[float, ...]
    interval: Interval | None
    p: float

    @property
    def mean(self) -> float:
        return mean(self.differences)

    @property
    def holds_zero(self) -> bool:
        """True where the interval holds 0, or there is none."""
        return self.interval is None or self.interval[0] <= 0 <= self.interval[1]


def paired(differences: Sequence[float]) -> PairedDifference:
    """The mean of `differences` with its interval. Raises `ValueError` for none."""
    if not differences:
        raise ValueError("no pair")
    student = around_mean(differences)
    interval = None
    if student is not None:
        low, high = bootstrap(differences)
        interval = min(student[0], low), max(student[1], high)
    return PairedDifference(tuple(differences), interval, sign_flip_p(differences))


def _resampled(values: Sequence[float]) -> list[tuple[float, float]]:
    """Means of resamples and their probabilities."""
    num = len(values)
    if num > MOST_RESAMPLED_EXACTLY:
        draw = random.Random(0)
        return [(mean(draw.choices(values, k=num)), 1 / RESAMPLES) for _ in range(RESAMPLES)]
    outcomes = []
    for places in combinations_with_replacement(range(num), num):
        ways = math.factorial(num)
        for place in set(places):
            ways //= math.factorial(places.count(place))
        outcomes.append((math.fsum(values[place] for place in places) / num, ways / num**num))
    return outcomes


def _first_beyond(means: Sequence[tuple[float, float]], tail: float) -> float:
    """The first of the ordered values up to which more than `tail` of the probability lies."""
    seen = 0.0
    for value, weight in means:
        seen += weight
        if seen > tail:
            return value
    return means[-1][0]
