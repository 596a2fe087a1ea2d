"""Limits that verdicts and anti-patterns share, and what they ask of a series of steps. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

RISING_STEPS = 20
LENGTH_SURGE = 1.2
LENGTH_WINDOW = 100
CLIPPED = 0.2
"""Share of tokens that a clip may hold."""
OUTLIER = 0.8
"""Difference of a token's probability between two engines that noise does not make."""
FAR, FAR_APART, TIGHT = 16.0, 0.2, 0.02
"""Factor and difference of one token's probabilities that noise does not make where 95% of the tokens differ by at most
`TIGHT`. Clean bfloat16 runs had factors up to 1.3 and differences up to 0.06."""
LONG_ROW = 512
"""Tokens of an answer above which a product of ratios says more about the length than about the policies."""
LAST_TURN = 7
"""The last turn with a figure of its own; those after it share one."""
LAST_AGE = 7
"""The last age in versions with a figure of its own."""
LAST_SERVER = 15
"""The last of a run's servers with a figure of its own, the first being 0."""
FAR_AHEAD = 4
"""Versions of lag at which uncorrected training was seen to collapse."""


def rising(values: Sequence[float]) -> bool:
    """True when the last `RISING_STEPS` values have a least-squares slope more than two standard errors above 0."""
    values = [value for value in values[-RISING_STEPS:] if math.isfinite(value)]
    n = len(values)
    if n < 5:
        return False
    center, average = (n - 1) / 2, math.fsum(values) / n
    spread = math.fsum((i - center) ** 2 for i in range(n))
    slope = math.fsum((i - center) * (v - average) for i, v in enumerate(values)) / spread
    residual = math.fsum((v - average - slope * (i - center)) ** 2 for i, v in enumerate(values))
    return slope > 2 * math.sqrt(residual / (n - 2) / spread)


def series(history: Sequence[Mapping[str, float]], name: str) -> list[float]:
    """A metric of the steps that measured it."""
    return [step[name] for step in history if name in step]


def surged(history: Sequence[Mapping[str, float]], name: str) -> float | None:
    """Growth of `name` over the last `LENGTH_WINDOW` steps as a factor, where it is above `LENGTH_SURGE`."""
    if len(history) <= LENGTH_WINDOW or name not in history[-1] or name not in history[-1 - LENGTH_WINDOW]:
        return None
    latest, earlier = history[-1][name], history[-1 - LENGTH_WINDOW][name]
    return latest / earlier if earlier > 0 and latest / earlier > LENGTH_SURGE else None
