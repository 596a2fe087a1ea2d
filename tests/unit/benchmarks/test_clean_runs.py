"""The verdict of a clean run names everything that does not hold."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.clean_runs import judged

GOOD = {"replay/applied_fraction": 1.0, "routing/local_flip_rate": 0.01, "engine/k3_kl": 1e-5, "ledger/rejected": 0.0}


def rows(**changes: Any) -> list[dict[str, Any]]:
    return [{"step": 0}, GOOD, GOOD | changes]


def test_a_run_that_does_all_holds_and_what_nobody_measured_is_a_dash() -> None:
    found = judged(rows(**{"routing/local_flip_rate": 0.03, "probe/cast_k3_kl": 2e-6}), 0, 2, may_move=False)
    assert found["verdict"] == "holds"
    assert found["flips mean"] == pytest.approx(0.02)
    assert found["flips worst"] == 0.03
    assert (found["cast k3"], found["quantization k3"]) == (2e-6, "-")


@pytest.mark.parametrize(
    ("changes", "code", "steps", "said"),
    [
        ({}, 1, 2, "ended with exit code 1"),
        ({}, 0, 3, "2 of 3 steps"),
        ({"replay/applied_fraction": 0.999}, 0, 2, "not every route was replayed"),
        ({"replay/applied_fraction": None}, 0, 2, "not every route was replayed"),
        ({"routing/moved_samples": 2.0}, 0, 2, "2 samples whose router has moved"),
        ({"ledger/rejected": 1.0}, 0, 2, "1 samples rejected"),
    ],
)
def test_each_fault_is_named(changes: dict[str, Any], code: int, steps: int, said: str) -> None:
    assert said in str(judged(rows(**changes), code, steps, may_move=False)["verdict"])


def test_a_run_that_never_began_does_not_hold() -> None:
    assert "0 of 200 steps" in str(judged([], 1, 200, may_move=False)["verdict"])


def test_routers_of_stale_samples_may_have_moved() -> None:
    assert judged(rows(**{"routing/moved_samples": 2.0}), 0, 2, may_move=True)["verdict"] == "holds"
