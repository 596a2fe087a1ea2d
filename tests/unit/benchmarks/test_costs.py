"""The share of a part is of the run with everything on, round by round; the order of runs turns."""

from __future__ import annotations

import pytest

from benchmarks.costs import EVERYTHING, WHOLE, WITHOUT, Cost, measured, rows


def test_a_part_costs_what_its_run_saves_of_the_whole_one_of_its_round() -> None:
    """Rounds of a machine that becomes ten times slower."""
    made: list[str] = []

    def make(name: str, number: int) -> Cost:
        made.append(name)
        slow = 10**number
        cpu = {WHOLE: 4.0, EVERYTHING: 3.0}.get(name, 4.0)
        return Cost(slow * 2.0, slow * cpu)

    found = {row["without"]: row for row in rows(measured(make, 3))}
    assert made[: len(WITHOUT)] == made[len(WITHOUT) : 2 * len(WITHOUT)][::-1] == list(WITHOUT)
    assert found[EVERYTHING]["of the CPU"] == pytest.approx(0.25)
    assert found["correction"]["of the CPU"] == pytest.approx(0.0)
    assert found[EVERYTHING]["of the step"] == pytest.approx(0.0)
    assert found[EVERYTHING]["CPU from"] == pytest.approx(0.25)
    assert found[EVERYTHING]["CPU to"] == pytest.approx(0.25)
    assert "of the CPU" not in found["-"]


def test_one_round_has_no_interval() -> None:
    found = list(rows(measured(lambda name, _: Cost(1.0, 1.0), 1)))
    assert "CPU from" not in found[-1]
