"""The interval of an evaluation, against the textbook's formula."""

from __future__ import annotations

from statistics import mean, stdev

import pytest

from moe_trm.tools.evaluate.measure import _interval


@pytest.mark.parametrize("rewards", [[0.0, 1.0], [0.0, 1.0, 1.0], [0.25, 0.5, 1.0, 0.0, 0.0, 1.0, 1.0]])
def test_of_the_mean_with_the_standard_deviation_of_a_sample(rewards: list[float]) -> None:
    reach = 1.96 * stdev(rewards) / len(rewards) ** 0.5
    assert _interval(rewards) == pytest.approx((mean(rewards) - reach, mean(rewards) + reach))


def test_one_answer_says_nothing_of_its_spread() -> None:
    assert _interval([1.0]) is None
