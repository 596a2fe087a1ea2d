"""Seconds of a step beside a peer's: from end to end, and as long where every second step has a probe."""

from __future__ import annotations

import pytest

from benchmarks.peers.against_trl import between_ends, typical


def test_what_lies_between_two_steps_counts() -> None:
    rows = [{"step": 0, "eval": 1.0}, *({"time/step_s": 0.5, "time/unix_s": 100 + 0.75 * step} for step in range(4))]
    assert between_ends(rows) == [0.75, 0.75, 0.75]


@pytest.mark.parametrize(
    "seconds", [[1.0, 3.0, 1.0, 3.0], [3.0, 1.0, 3.0], [1.0, 3.0, 1.0, 9.0, 1.0, 3.0, 1.0, 3.0, 1.0]]
)
def test_a_step_with_a_probe_counts_as_often_as_one_without(seconds: list[float]) -> None:
    assert typical(seconds) == 2.0
