"""The share of a part is of the whole runs beside it, so that a machine that becomes slower changes nothing."""

from __future__ import annotations

import pytest

from benchmarks.costs import EVERYTHING, WHOLE, WITHOUT, Cost, measured, rows


def test_a_part_costs_what_its_run_saves_of_the_whole_ones_beside_it() -> None:
    """Each run is slower than the one before by the same amount."""
    made: list[str] = []

    def make(name: str, number: int) -> Cost:
        assert number == len(made), "two runs would share a folder"
        made.append(name)
        slow = 100.0 + 10 * number
        return Cost(2 * slow, slow * {EVERYTHING: 0.75}.get(name, 1.0))

    found = {row["without"]: row for row in rows(measured(make, 2))}
    parts = [name for name in WITHOUT if name != WHOLE]
    warming, counted = made[:2], made[2:]
    assert set(warming) == {WHOLE, EVERYTHING}, "both servers"
    assert set(counted[::2]) == {WHOLE}
    assert counted[1::2] == [*parts, *reversed(parts)]
    assert found[EVERYTHING]["of the CPU"] == pytest.approx(0.25)
    assert found["correction"]["of the CPU"] == pytest.approx(0.0)
    assert found[EVERYTHING]["of the step"] == pytest.approx(0.0)
    assert found[EVERYTHING]["CPU from"] == pytest.approx(0.25)
    assert found[EVERYTHING]["CPU to"] == pytest.approx(0.25)
    assert "of the CPU" not in found["-"]


def test_one_round_has_no_interval() -> None:
    found = list(rows(measured(lambda name, _: Cost(1.0, 1.0), 1)))
    assert "CPU from" not in found[-1]
