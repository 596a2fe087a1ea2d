"""A draw of fixed size in which the younger have the greater chance, and the weights that undo it in expectation.

Shape letter: N items to draw from.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Array = np.ndarray
LEAST = 0.05
"""Priority by spread of a group whose rewards are equal. Ours."""


def freshness(ages_N: Array, tau: float) -> Array:
    """`[N]` priority of each item: exp(-age / tau), for ages in versions.

    Source: freshness-aware prioritised replay (arXiv 2604.16918), whose priorities decay with age in this way. The
    constant tau is ours.
    """
    # Only the proportions matter, and the youngest must not vanish with the others.
    priorities: Array = np.exp(-(ages_N - ages_N.min()) / tau)
    return priorities


def spread(rewards: Sequence[float]) -> float:
    """Priority of a group by its rewards: their standard deviation, and `LEAST`, so that every group may be drawn.

    Its samples have advantages of that size. Source: prioritised replay, |error| + epsilon (arXiv 1511.05952); the
    spread of rewards in the place of the error is ours.
    """
    return float(np.std(rewards)) + LEAST


def chances(priorities_N: Array, count: int) -> Array:
    """`[N]` chance of each item to be among `count` drawn ones: proportional to its priority, at most 1.

    pi_i = min(1, c p_i), with c such that the sum is `count`. With `count` of N or more, everything is drawn.
    """
    if count >= len(priorities_N):
        return np.ones(len(priorities_N))
    certain = np.zeros(len(priorities_N), bool)
    while True:
        left = priorities_N[~certain].sum()
        scaled = np.where(certain, 1.0, priorities_N * (count - certain.sum()) / left)
        over = ~certain & (scaled >= 1)
        if not over.any():
            return scaled
        certain |= over


def drawn(chances_N: Array, start: float) -> list[int]:
    """Places of the drawn items, ascending: systematic sampling from `start` in [0, 1).

    Item i has the interval from sum_{j<i} pi_j to sum_{j<=i} pi_j, and is drawn if start + k is in it for an integer k.
    So its chance over all starts is pi_i exactly, and none is drawn twice. Source: Madow 1949.
    """
    if not len(chances_N):
        return []
    ends = np.cumsum(chances_N)
    count = round(float(ends[-1]))
    ends[-1] = count  # of rounding
    places = np.searchsorted(ends, start + np.arange(count), side="right")
    return sorted(set(places.tolist()))


def importance(chances_N: Array, count: int, power: float) -> Array:
    """`[N]` weight of each item if it is drawn: ((count / N) / pi_i)^power, or 1 where everything is drawn.

    With power 1 the weighted sum over the drawn items has the expectation of an even draw of as many. Source:
    importance sampling of prioritised replay (arXiv 1511.05952), in the form of Horvitz and Thompson 1952 for draws
    without repetition.
    """
    even = min(1.0, count / max(1, len(chances_N)))
    return (even / chances_N) ** power
