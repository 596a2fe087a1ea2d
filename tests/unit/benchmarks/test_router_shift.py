"""Correlations between neighbouring steps: they tell which of two series goes first."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.evidence.router_shift import FROM_STEP, K3, SHIFT, correlations, measure
from moe_trm.run_folder.run import Row, Run

STEPS = 300


def run(delay: int) -> Run:
    """Total k3 that repeats the shift `delay` steps later, among steps of noise."""
    shift = np.random.default_rng(0).random(FROM_STEP + STEPS)
    k3 = np.roll(shift, delay) ** 3
    early: list[Row] = [{"step": step, SHIFT: float(step), K3: float(step)} for step in range(FROM_STEP)]
    late = [{"step": step, SHIFT: shift[step], K3: k3[step]} for step in range(FROM_STEP, FROM_STEP + STEPS)]
    return Run(Path("run"), {}, [*early, *late, {"step": FROM_STEP + STEPS, K3: 1.0}], ())


@pytest.mark.parametrize(("delay", "name"), [(0, "same"), (1, "shift_first"), (-1, "k3_first")])
def test_the_series_that_goes_first_is_named(delay: int, name: str) -> None:
    found = correlations(run(delay))
    assert found.pop(name) == pytest.approx(1, abs=0.02)
    assert all(abs(value) < 0.2 for value in found.values()), found


def test_rows_of_arms_and_of_all_runs() -> None:
    first, _second, *rest = measure({"R3": [run(0), run(1)], "sync_R3": [run(-1)]})
    assert (first["arm"], first["runs"]) == ("R3", 2)
    assert first["same"] == pytest.approx(0.5, abs=0.1)
    assert [row["runs"] for row in rest] == [3] * 5
    assert rest[-1]["correlation"] == "shift_first - k3_itself"
