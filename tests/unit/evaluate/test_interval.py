"""The interval of an evaluation, against the textbook's formula."""

from __future__ import annotations

from dataclasses import replace
from statistics import mean, stdev

import pytest

from moe_trm.evaluate.measure import _interval
from moe_trm.rollout.evaluation import SetAnswers
from moe_trm.types import Prompt
from tests.unit.records import make_record


def interval(*rewards: float | None) -> tuple[float, float] | None:
    """Of greedy answers with these rewards; None: one that was rejected."""
    answers = ["reward_error" if value is None else replace(make_record(), reward=value) for value in rewards]
    return _interval(SetAnswers(tuple(Prompt(str(n), (1,)) for n in range(len(answers))), answers, []))


@pytest.mark.parametrize("rewards", [[0.0, 1.0], [0.0, 1.0, 1.0], [0.25, 0.5, 1.0, 0.0, 0.0, 1.0, 1.0]])
def test_of_the_mean_with_the_standard_deviation_of_a_sample(rewards: list[float]) -> None:
    reach = 1.96 * stdev(rewards) / len(rewards) ** 0.5
    assert interval(*rewards, None) == pytest.approx((mean(rewards) - reach, mean(rewards) + reach))


def test_one_answer_says_nothing_of_its_spread() -> None:
    assert interval(1.0, None) is None
