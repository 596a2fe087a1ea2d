"""The number of rows that a sample needs, and the faults that it would have shown.

A fault may lie in whole rows: then it is seen if an affected row is in the sample. Or it may be scattered over single
tokens of every row: then it is seen if enough of them disagree (`routing.judge.token_agreement`).
"""

from __future__ import annotations

from math import ceil, exp, lgamma, log, log1p

import numpy as np

from routing.judge.token_agreement import EVIDENCE, LEAST, evidence, least_lost


def row_power(sample: int, rows: int, share: float) -> float:
    """Chance that a sample of `rows` without replacement holds one of the `share` that is affected."""
    affected = ceil(share * rows)
    if sample > rows - affected:
        return 1.0
    missed = _log_choose(rows - affected, sample) - _log_choose(rows, sample)
    return 1 - exp(missed)


def rows_needed(rows: int, share: float, power: float) -> int:
    """The smallest sample with that chance; all rows where no smaller one has it."""
    low, high = 1, rows
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if row_power(middle, rows, share) >= power else (middle + 1, high)
    return low


def token_power(tokens: int, share: float, shown: float = 1.0) -> float:
    """Chance that `share` of single tokens is refused, of which each disagrees with the chance `shown`."""
    low, high = 0, tokens + 1
    while low < high:
        middle = (low + high) // 2
        low, high = (
            (low, middle) if evidence(middle / max(tokens, 1), LEAST, tokens) >= EVIDENCE else (middle + 1, high)
        )
    return at_least(low, tokens, share * shown)


def unrelated_shown(slots: int, chance: float) -> float:
    """Chance that a token with the routes of another one disagrees, if these share nothing but luck."""
    return at_least(least_lost(slots, chance), slots, chance)


def at_least(least: int, number: int, chance: float) -> float:
    """`P(Binomial(number, chance) >= least)`."""
    if least <= 0 or least > number or not 0 < chance < 1:
        return float(least <= 0 or (chance >= 1 and least <= number))
    counts = range(least, number + 1)
    logs = [_log_choose(number, k) + k * log(chance) + (number - k) * log1p(-chance) for k in counts]
    return min(float(np.exp(logs).sum()), 1.0)


def _log_choose(number: int, taken: int) -> float:
    return lgamma(number + 1) - lgamma(taken + 1) - lgamma(number - taken + 1)
