"""Results of `benchmarks.mask_rate`: reject rates of rules, and predictions for TRM-Max."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Rates:
    """Reject rates of one rule (or preset) at one setting, pooled over all updates.

    Attributes:
        rule, setting: its name and thresholds; target: the reject rate they were chosen for, None where they were
            given.
        rows, tokens: rejected shares; ess: effective sample size of the weights over all tokens, (sum w)^2 / (n sum
            w^2).
        deciles: rejected share of rows by decile of length, short to long; NaN where a decile is empty.
        positive, negative, correct, wrong: rejected share of rows by sign of the advantage, by reward above 0.
    """

    rule: str
    setting: Mapping[str, float | str]
    target: float | None
    rows: float
    tokens: float
    ess: float
    deciles: tuple[float, ...]
    positive: float
    negative: float
    correct: float
    wrong: float


@dataclass(frozen=True)
class Prediction:
    """Reject rate of TRM-Max at one threshold, measured and predicted by 1 - (1 - p)^T, overall and by decile of
    length.
    """

    max_kl: float
    violation_probability: float
    measured: float
    predicted: float
    measured_deciles: tuple[float, ...]
    predicted_deciles: tuple[float, ...]
