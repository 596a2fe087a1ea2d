"""Kept sets judged by what the sampler's settings allow, on the learner's own probabilities.

Shape letter: N sampled tokens.

The sampler keeps the ids of rank below `top_k` before which less than `top_p` of the mass lies, and then those above
`min_p`. So for the mass m of a kept set, and the mass q of its least likely ids:

    m >= top_p unless top_k or min_p cut the set,    m - q <= top_p.

The learner's probabilities differ from the engine's. Errors of the logits that are at most e apart move the log-odds of
a set's mass by at most e, so masses are compared by their log-odds. The tolerance is taken from what the two engines
measurably disagree about, the log-odds of the sampled tokens over their kept sets, which a false set leaves alone.
Their log-ratios would be too small a scale: near a probability of 1 they vanish, however far the logits are apart.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

MARGIN = 1e-3
"""Smallest difference of masses that counts, whatever it is in log-odds."""
TOLERANCE = 0.25
"""Log-odds that are tolerated in any case: 0.013 of mass at top_p = 0.95, 0.05 at 0.8."""
QUANTILE, TIMES, TIMES_LARGEST = 0.99, 5.0, 2.0
"""The tolerance is `TIMES` this quantile of the differences of log-odds, and at least `TIMES_LARGEST` their largest."""
LEAST_REST = 1e-3
"""Least 1 - p that a log-ratio is divided by: nearer to 1, the difference of two log-probs is their rounding."""
MANY = 12
"""Tokens that show the size of the error; the tolerance of n fewer ones is `MANY` / n times as large."""
FEW_SETS = 0.01
"""Share of a row's sets beyond the tolerance, or one set, that flips of a router explain: one token in 500 at int4."""
LONE = 4.0
"""A set this many times the tolerance away is wrong however few there are: of 86 such sets of sound engines, none was
more than 2.9 times away.
"""
NEARLY_ONE = 1 - 1e-4
"""Mass of a set that nothing cuts: ids whose probability is 0 in the engine's arithmetic are not kept."""


@dataclass(frozen=True)
class JudgedSets:
    """Result of `SamplerBounds.judge`.

    Attributes:
        wrong: `[N]` bool, sets that the sampler cannot have kept.
        lowest: the power: sets with less mass than this are found, unless top_k or min_p cut them. 0 where none is.
    """

    wrong: Tensor
    lowest: float


@dataclass(frozen=True)
class SamplerBounds:
    """Settings of the sampler.

    Attributes:
        top_p, top_k: as in `SamplingParams`.
        has_floor: whether a set has at least the mass top_p: not with min_p, nor where top_k cuts sets, and the engine
            may count top_p of the mass of the top_k.
        minimal: whether sets have no id more than they need, as all have to which nothing was added.
    """

    top_p: float
    top_k: int
    has_floor: bool = True
    minimal: bool = True

    @property
    def floor(self) -> float:
        """Least mass of a set that only top_p cut."""
        return min(self.top_p, NEARLY_ONE)

    def lowest(self, tolerance: float = TOLERANCE) -> float:
        """Mass below which a set is wrong, at a tolerance in log-odds; 0 where no set is."""
        if not self.has_floor:
            return 0.0
        odds = self.floor / (1 - self.floor) * math.exp(-tolerance)
        return min(odds / (1 + odds), self.floor - MARGIN)

    def judge(
        self, sizes_N: Tensor, log_mass_N: Tensor, log_least_N: Tensor, learner_N: Tensor, engine_N: Tensor
    ) -> JudgedSets:
        """The sets of one row, of which the learner has the log of the mass, and of its least likely ids'.

        A few sets beyond the tolerance (`FEW_SETS`) are wrong only where they are `LONE` times as far away.
        `learner_N`, `engine_N`: log-probs of the sampled tokens over their sets.
        """
        tolerance = tolerated(learner_N, engine_N)
        mass = log_mass_N.double().exp()
        rest = (mass - log_least_N.double().exp()).clamp(min=0.0)
        wrong = self._beyond(tolerance, sizes_N, mass, rest)
        if int(wrong.sum()) <= max(1.0, FEW_SETS * len(wrong)):
            wrong = self._beyond(LONE * tolerance, sizes_N, mass, rest)
        return JudgedSets(wrong, self.lowest(tolerance))

    def _beyond(self, tolerance: float, sizes_N: Tensor, mass_N: Tensor, rest_N: Tensor) -> Tensor:
        """`[N]` bool, sets outside the bounds by more than a tolerance in log-odds.

        `rest_N`: masses without the least likely ids.
        """
        beyond = (sizes_N < self.top_k) & (mass_N < self.lowest(tolerance))
        if self.top_p < 1 and self.minimal:
            highest = math.log(self.floor / (1 - self.floor)) + tolerance
            beyond |= (rest_N > self.floor + MARGIN) & (rest_N.clamp(1e-12, 1 - 1e-12).logit() > highest)
        return beyond


def tolerated(learner_N: Tensor, engine_N: Tensor) -> float:
    """Tolerated difference of log-odds, from the log-probs of the sampled tokens in learner and engine."""
    if not len(learner_N):
        return TOLERANCE
    size = moved_odds(learner_N, engine_N).sort().values
    usual = float(size[math.floor(QUANTILE * (len(size) - 1))])
    measured = max(TOLERANCE, TIMES * usual, TIMES_LARGEST * float(size[-1]))
    return measured * max(1.0, MANY / len(size))


def moved_odds(learner_N: Tensor, engine_N: Tensor) -> Tensor:
    """`[N]` absolute differences of log-odds, at least: |log p - log p'| / max(1 - p, 1 - p', `LEAST_REST`).

    The derivative of log p by the log-odds is 1 - p. The larger 1 - p is the cautious one: a set without its likely ids
    gives the learner a probability of 1, and may not widen the tolerance by that.
    """
    learner, engine = learner_N.detach().double(), engine_N.detach().double()
    rest = -torch.expm1(torch.minimum(learner, engine))
    return (learner - engine).abs() / rest.clamp(min=LEAST_REST)
