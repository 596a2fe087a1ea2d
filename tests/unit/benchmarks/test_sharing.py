"""Speed of two sides on the same cores: closed forms, and a queue that is played through."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.sharing import Cores

busy = st.floats(0.01, 1.0)


def test_enough_whole_cores_slow_nobody_down() -> None:
    assert Cores(2).sharing(1.0, 1.0) == 1.0
    assert Cores(8).sharing(5.0, 3.0) == 1.0
    assert Cores(1).sharing(0.0, 1.0) == Cores(1).sharing(1.0, 0.0) == 1.0


def test_sides_that_never_wait_divide_the_cores() -> None:
    """As many shares as are asked for: min(1, cores / asked)."""
    assert Cores(1).sharing(1.0, 1.0) == pytest.approx(1 / 2)
    assert Cores(2).sharing(2.0, 2.0) == pytest.approx(1 / 2)
    assert Cores(2).sharing(2.0, 1.0) == pytest.approx(2 / 3)
    assert Cores(4).sharing(3.0, 3.0) == pytest.approx(4 / 6)


def test_two_threads_of_one_core_do_less_than_two_cores() -> None:
    """Both at 0.6 of their speed alone, where they meet for half of the time."""
    assert Cores(2, 0.6).sharing(1.0, 1.0) == pytest.approx(0.6)
    assert Cores(2, 0.6).sharing(1.0, 0.5) == pytest.approx(1 / (1 + 0.5 * (1 / 0.6 - 1)))
    assert Cores(2, 0.5).sharing(1.0, 1.0) == pytest.approx(Cores(1).sharing(1.0, 1.0))


def test_the_rate_of_threads_between_one_and_all_cores() -> None:
    cores = Cores(2, 0.7)
    assert [cores.rate(threads) for threads in (0.5, 1, 1.5, 2, 3)] == pytest.approx([0.5, 1, 1.2, 1.4, 1.4])
    assert [Cores(4).rate(threads) for threads in (1, 2.5, 4, 5)] == [1, 2.5, 4, 4]
    assert Cores(1).rate(3) == 1


@given(busy, busy)
def test_one_core_is_slowed_down_by_the_time_that_both_compute(servers: float, learner: float) -> None:
    assert Cores(1).sharing(servers, learner) == pytest.approx(1 / (1 + servers * learner))


@given(st.integers(1, 8), st.floats(0.0, 1.0), st.floats(0.01, 8), st.floats(0.01, 8))
def test_shares_are_possible_ones(number: int, between: float, servers: float, learner: float) -> None:
    """No more work is done than the cores can do, no side gains, and more cores slow nobody down."""
    crowded = 1 / number + (1 - 1 / number) * between
    cores = Cores(number, crowded)
    shared = cores.sharing(servers, learner)
    assert 0 < shared <= 1
    if min(servers, learner) >= 1:
        assert shared * (cores.rate(servers) + cores.rate(learner)) <= number * crowded + 1e-9
    assert Cores(number, 1.0).sharing(servers, learner) >= shared - 1e-12


@pytest.mark.parametrize(("servers", "learner", "crowded"), [(0.5, 0.5, 0.5), (0.9, 0.4, 0.65), (0.3, 0.95, 0.8)])
def test_the_closed_form_is_that_of_a_queue(servers: float, learner: float, crowded: float) -> None:
    """Two customers that wait and compute in turn, each for random times, over 40,000 turns."""
    assert played(servers, learner, crowded) == pytest.approx(Cores(2, crowded).sharing(servers, learner), rel=0.02)


def played(first: float, second: float, together: float, turns: int = 40_000, seed: int = 1) -> float:
    """Mean speed of two sides that wait and compute; while both compute, each has `together` of its speed."""
    chance, shares = random.Random(seed), (first, second)
    computes, left = [False, False], [chance.expovariate(1 / (1 - share)) for share in shares]
    done, now = 0.0, 0.0
    for _ in range(turns):
        speeds = [together if computes[side] and all(computes) else 1.0 for side in (0, 1)]
        ends = [amount / speed for amount, speed in zip(left, speeds, strict=True)]
        took = min(ends)
        now, side = now + took, ends.index(took)
        for index in (0, 1):
            left[index] -= took * speeds[index]
            done += took * speeds[index] / 2
        computes[side] = not computes[side]
        left[side] = chance.expovariate(1 / (shares[side] if computes[side] else 1 - shares[side]))
    return done / now
