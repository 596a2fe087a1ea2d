"""Ratios are found under drift, chance and outliers, and intervals say how well."""

from __future__ import annotations

import math
import random

import pytest

from benchmarks.turn_ratios import Measured, ratio_of_kinds, ratios

TRUE = {"whole": 1.0, "less": 0.95, "same": 1.0, "much less": 0.8}


def measured(rounds: int, noise: float, *, seed: int = 0, spoilt: float = 0.0) -> list[Measured]:
    """Rounds of which the last is half as fast as the first. Longer answers take longer; `spoilt` take up to thrice."""
    chance = random.Random(seed)
    found = []
    for number in range(rounds):
        for arm in [*TRUE, "whole"]:
            length, longest = 10 * math.exp(chance.gauss(0, 0.1)), 28 * math.exp(chance.gauss(0, 0.05))
            value = TRUE[arm] * (1 + number / rounds) * length**0.5 * longest**0.3
            value *= math.exp(noise * chance.gauss(0, 1)) * (chance.uniform(2, 3) if chance.random() < spoilt else 1)
            found.append(Measured(arm, number, value, (length, longest)))
    return found


def test_ratios_are_exact_where_nothing_else_moves() -> None:
    found = ratios(measured(3, 0.0), "whole")
    assert set(found) == TRUE.keys() - {"whole"}
    for name, ratio in found.items():
        assert ratio.value == pytest.approx(TRUE[name], rel=1e-9)
        assert ratio.interval == pytest.approx((TRUE[name], TRUE[name]), rel=1e-9)


@pytest.mark.parametrize("spoilt", [0.0, 0.1])
def test_five_percent_are_seen_under_a_drift_of_two(spoilt: float) -> None:
    found = ratios(measured(40, 0.05, spoilt=spoilt), "whole")
    low, high = found["less"].interval
    assert low < 0.95 < high < 1, "they are there, and are not nothing"
    assert high - low < 0.06
    low, high = found["same"].interval
    assert low < 1 < high


def test_a_few_spoilt_turns_hardly_widen_the_interval() -> None:
    def width(spoilt: float) -> float:
        low, high = ratios(measured(40, 0.05, spoilt=spoilt), "whole")["less"].interval
        return high - low

    assert width(0.05) < 1.3 * width(0.0), "plain least squares would be four times as wide"


@pytest.mark.parametrize("spoilt", [0.0, 0.15])
def test_intervals_hold_the_truth_as_often_as_they_say(spoilt: float) -> None:
    held = [
        ratio.interval[0] <= TRUE[name] <= ratio.interval[1]
        for seed in range(60)
        for name, ratio in ratios(measured(8, 0.03, seed=seed, spoilt=spoilt), "whole").items()
    ]
    assert 0.9 < sum(held) / len(held) < 0.99


def test_where_there_is_nothing_to_know_the_interval_is_wide() -> None:
    low, high = ratios(measured(3, 0.5), "whole")["less"].interval
    assert low < 0.7
    assert high > 1.3


def test_arms_with_slopes_of_their_own_are_compared_at_the_mean_of_chance() -> None:
    chance = random.Random(0)
    found = []
    for number in range(40):
        for arm, slope, factor in (("base", 0.8, 1.0), ("other", 0.2, 1.3)):
            length = 10 * math.exp(chance.gauss(0, 0.2))
            found.append(Measured(arm, number, factor * length**slope, (length,)))
    mean = math.exp(sum(math.log(one.chance[0]) for one in found) / len(found))
    own = ratios(found, "base", own_slopes=True)["other"]
    assert own.value == pytest.approx(1.3 * mean ** (0.2 - 0.8))
    low, high = ratios(found, "base")["other"].interval
    assert high - low > 0.01, "one slope for both leaves something over"


def test_more_unknowns_than_measurements_are_refused() -> None:
    with pytest.raises(ValueError, match="5 measurements for 5 unknowns: more rounds"):
        ratios(measured(1, 0.1), "whole")


def of_jobs(scatter: float, seed: int) -> tuple[list[Measured], dict[str, str]]:
    """Four jobs of each of two kinds, each with a speed of its own for as long as it lives."""
    chance = random.Random(seed)
    kinds = {f"{kind} {number}": kind for kind in ("with", "without") for number in range(4)}
    own = {job: math.exp(scatter * chance.gauss(0, 1)) * (1.05 if kinds[job] == "with" else 1.0) for job in kinds}
    turns = [
        Measured(job, number, own[job] * (1 + 0.3 * number) * math.exp(0.01 * chance.gauss(0, 1)))
        for number in range(10)
        for job in kinds
    ]
    return turns, kinds


def test_jobs_of_one_kind_that_differ_widen_the_interval() -> None:
    """Their turns alone would leave out the truth most of the time."""
    held, naive = 0, 0
    for seed in range(60):
        turns, kinds = of_jobs(0.03, seed)
        low, high = ratio_of_kinds(turns, kinds, "with", "without").interval
        held += low <= 1.05 <= high
        pooled = [Measured(kinds[one.arm], one.round, one.value) for one in turns]
        low, high = ratios(pooled, "without")["with"].interval
        naive += low <= 1.05 <= high
    assert held >= 53
    assert naive < 45
    exact, kinds = of_jobs(0.0, 0)
    assert ratio_of_kinds(exact, kinds, "with", "without").value == pytest.approx(1.05, abs=0.01)
