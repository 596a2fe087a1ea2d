"""Versions that the engine is given."""

from __future__ import annotations

from moe_trm.step.cadence import Cadence


def test_every_second_version_is_pushed_and_the_first_and_the_last_of_a_run() -> None:
    cadence = Cadence(every=2, first=3, last=9)
    assert [version for version in range(3, 10) if cadence.pushes(version)] == [3, 4, 6, 8, 9]
    assert all(Cadence(1, 0, 9).pushes(version) for version in range(10))


def test_versions_that_the_bound_on_age_lets_sample() -> None:
    assert [Cadence(1, 0, 9).held(bound) for bound in (0, 1, 4)] == [1, 2, 5]
    assert [Cadence(3, 0, 9).held(bound) for bound in (2, 3, 5, 6)] == [1, 2, 2, 3]
