"""The bound of the share of runs with an alarm, and a few steps of the small learners that it is measured on."""

from __future__ import annotations

import pytest

from benchmarks.false_alarms import ALARMS, ARITHMETICS, Run, upper_bound


@pytest.mark.parametrize(
    ("alarms", "runs", "bound"), [(0, 54, 1 - 0.05 ** (1 / 54)), (1, 20, 0.2161), (3, 10, 0.6066), (5, 5, 1.0)]
)
def test_the_bound_is_that_of_clopper_and_pearson(alarms: int, runs: int, bound: float) -> None:
    assert upper_bound(alarms, runs) == pytest.approx(bound, abs=1e-4)


def test_engines_disagree_by_their_arithmetic_and_nothing_is_raised() -> None:
    k3 = {}
    for name in ("float32", "bfloat16, stale", "int4 weights, stale"):
        run = Run(ARITHMETICS[name], 0, 4)
        for step in range(1, 5):
            run.step(step)
        assert not set(run.cases) & set(ALARMS)
        assert run.refused == 0
        k3[name] = max(run.k3)
    assert k3["float32"] < 1e-9 < k3["bfloat16, stale"] < 1e-3 < k3["int4 weights, stale"]
