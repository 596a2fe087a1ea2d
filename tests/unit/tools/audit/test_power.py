"""The size of a sample, against draws."""

from __future__ import annotations

import numpy as np
import pytest

from moe_trm.tools.audit.power import at_least, row_power, rows_needed, token_power


def test_the_chance_of_an_affected_row_is_that_of_draws() -> None:
    rng = np.random.default_rng(0)
    drawn = [bool((rng.permutation(50)[:20] < 3).any()) for _ in range(4000)]
    assert row_power(20, 50, 0.05) == pytest.approx(np.mean(drawn), abs=0.03)


def test_the_sample_is_the_smallest_that_suffices() -> None:
    assert rows_needed(10**6, 0.03, 0.99) == 152
    number = rows_needed(200, 0.03, 0.99)
    assert row_power(number, 200, 0.03) >= 0.99 > row_power(number - 1, 200, 0.03)
    assert rows_needed(20, 0.03, 0.99) == 20
    assert row_power(20, 20, 0.03) == 1.0


def test_scattered_tokens_need_many_tokens() -> None:
    assert token_power(50, 0.03) < 0.1
    assert token_power(5000, 0.03) > 0.999
    assert token_power(5000, 0.03, shown=0.0) == 0.0


def test_a_tail_of_a_binomial() -> None:
    assert at_least(1, 3, 0.5) == pytest.approx(7 / 8)
    assert at_least(0, 3, 0.5) == 1.0
    assert at_least(4, 3, 0.5) == 0.0
    assert at_least(3, 3, 1.0) == 1.0
