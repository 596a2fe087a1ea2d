"""The overhead of the agents' address: medians and intervals of pairs, without a server."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from benchmarks import agent_door
from benchmarks.agent_door import compared, interval


def test_the_interval_of_a_median() -> None:
    values = np.array([0.01, 0.02, 0.03, 0.04, 0.05])
    low, high = interval(values)
    assert 0.01 <= low <= 0.03 <= high <= 0.05
    assert interval(np.full(4, 0.2)) == (0.2, 0.2)


def test_each_way_is_first_in_every_other_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that each way moves: 1 s past the door, 1.25 s through it, for the same tokens."""
    now, order = 0.0, ""

    def way(name: str, seconds: float) -> agent_door.Way:
        async def run(seed: int) -> int:
            nonlocal now, order
            now += seconds
            order += name
            return 100

        return run

    monkeypatch.setattr("time.perf_counter", lambda: now)
    row = asyncio.run(compared("kind", (way("p", 1.0), way("t", 1.25)), sessions=2, pairs=3))
    assert order == "tppttppt"
    assert (row["past_tokens_per_s"], row["through_tokens_per_s"]) == (100, 80)
    assert row["overhead"] == row["low"] == row["high"] == 0.2
