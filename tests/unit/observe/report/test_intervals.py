"""Intervals over seeds against closed forms and hand-counted resamples."""

from __future__ import annotations

import math

import pytest

from moe_trm.observe.report import intervals
from moe_trm.observe.report.intervals import (
    around_mean,
    binomial_reach,
    bootstrap,
    paired,
    repetition_noise,
    sign_flip_p,
    welch,
)


def test_the_interval_of_a_mean_is_students() -> None:
    """1, 2, 3: mean 2, deviation 1, so 4.303 / sqrt(3) on either side."""
    assert around_mean([1.0, 2.0, 3.0]) == pytest.approx((2 - 4.303 / math.sqrt(3), 2 + 4.303 / math.sqrt(3)))
    assert around_mean([5.0, 5.0]) == (5.0, 5.0)
    assert around_mean([5.0]) is None


def test_welch_of_equal_and_of_unequal_spreads() -> None:
    """1, 2, 3 and 2, 4, 6: v = 1/3 and 4/3, so (5/3)^2 / (1/18 + 16/18) = 2.94, down to 2, and 4.303 sqrt(5/3).

    Of equal spreads 2 + 2 degrees are left: 2.776 sqrt(2/3).
    """
    reach = 4.303 * math.sqrt(5 / 3)
    assert welch([1.0, 2.0, 3.0], [2.0, 4.0, 6.0]) == pytest.approx((2 - reach, 2 + reach))
    reach = 2.776 * math.sqrt(2 / 3)
    assert welch([1.0, 2.0, 3.0], [5.0, 6.0, 7.0]) == pytest.approx((4 - reach, 4 + reach))
    assert welch([1.0, 1.0], [3.0, 3.0]) == (2.0, 2.0)
    assert welch([1.0], [2.0, 3.0]) is None


def test_answers_alone_leave_a_reach() -> None:
    """p = q = 1/2 of 100 answers: 1.96 sqrt(0.5 / 100) = 0.1386, and half of it for the mean of four pairs."""
    assert binomial_reach([(0.5, 0.5)], 100) == pytest.approx(0.138593, abs=1e-6)
    assert binomial_reach([(0.5, 0.5)] * 4, 100) == pytest.approx(0.069296, abs=1e-6)
    assert binomial_reach([(0.0, 1.0)], 100) == 0.0


def test_repetitions_deviate_by_half_their_squared_difference() -> None:
    assert repetition_noise([(0.0, 0.2), (0.1, 0.1)]) == pytest.approx(0.1)


def test_a_bootstrap_of_three_is_their_range() -> None:
    """The mean of three equal draws has probability 1/27 = 3.7% on either side, more than the tail of 2.5%."""
    assert bootstrap([0.1, 0.2, 0.6]) == pytest.approx((0.1, 0.6))


def test_a_bootstrap_of_four_counted_by_hand() -> None:
    """0, 0, 0, 4: the mean is the number of fours drawn, binomial(4, 1/4): 0 has 31.6%, 3 and more 5.1%, 4 0.4%."""
    assert bootstrap([0.0, 0.0, 0.0, 4.0]) == (0.0, 3.0)
    assert bootstrap([0.0, 0.0, 0.0, -4.0]) == (-3.0, 0.0)


def test_drawn_resamples_come_near_the_normal_interval() -> None:
    """0 to 39: the mean of a resample has deviation sqrt((40^2 - 1) / 12 / 40) = 1.825."""
    low, high = bootstrap([float(value) for value in range(40)])
    assert (low, high) == pytest.approx((19.5 - 1.96 * 1.825, 19.5 + 1.96 * 1.825), abs=0.15)
    assert bootstrap([float(value) for value in range(40)]) == (low, high), "the seed is fixed"


def test_exact_and_drawn_resamples_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    values = [0.0, 1.0, 2.0, 3.0, 5.0, 8.0, 13.0]
    exact = bootstrap(values)
    monkeypatch.setattr(intervals, "MOST_RESAMPLED_EXACTLY", 0)
    assert bootstrap(values) == pytest.approx(exact, abs=0.3)


@pytest.mark.parametrize(
    ("differences", "p"),
    [
        ([1.0, 1.0, 1.0], 2 / 8),
        ([1.0] * 6, 2 / 64),
        ([1.0, -1.0], 1.0),
        ([3.0, 1.0, -1.0], 6 / 8),  # sums of the eight: 5, 3, 3, 1 and their negatives; three and more: six
        ([0.0, 0.0], 1.0),
        ([0.1, 0.2, 0.3], 2 / 8),  # its own sum is met by itself, whatever the rounding
    ],
)
def test_sign_flips_counted_by_hand(differences: list[float], p: float) -> None:
    assert sign_flip_p(differences) == p


def test_the_interval_of_pairs_is_the_wider_one() -> None:
    """Of three positive differences the bootstrap leaves 0 out, and Student's interval does not: nothing is shown."""
    found = paired([0.1, 0.2, 0.6])
    student = around_mean([0.1, 0.2, 0.6])
    assert student is not None
    assert bootstrap([0.1, 0.2, 0.6])[0] > 0
    assert found.interval == pytest.approx(student)
    assert found.holds_zero
    close = paired([0.5, 0.51, 0.52])
    assert not close.holds_zero
    assert close.mean == pytest.approx(0.51)
    assert close.p == 0.25


def test_equal_differences_and_a_single_pair() -> None:
    assert paired([0.25, 0.25, 0.25]).interval == (0.25, 0.25)
    assert paired([0.0, 0.0, 0.0]).holds_zero
    assert paired([0.25]).interval is None
    assert paired([0.25]).holds_zero
    with pytest.raises(ValueError, match="no pair"):
        paired([])
