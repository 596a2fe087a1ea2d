"""The share of a part is found among rounds of other speeds and answers of other lengths."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from benchmarks.costs import (
    EVERYTHING,
    ROUND,
    ROUNDS_OF_SERVERS,
    WHOLE,
    WITHOUT,
    Make,
    Run,
    details,
    measured,
    rows,
    shares,
)

SHARES = {EVERYTHING: 0.05, "sampling masks": 0.02, "correction": 0.0, "proof of pushes": 0.01}
"""That of routes is not there: 0.04."""
PARTS = [name for name in WITHOUT if name != WHOLE]


def found_of(noise: float, rounds: int, made: list[str] | None = None) -> list[list[tuple[str, Run]]]:
    """Runs whose seconds are known but for `noise`: later rounds are slower, longer answers cheaper for each token."""
    chance, counted, started = random.Random(0), itertools.count(), itertools.count(1)

    def run(name: str, number: int) -> Run:
        if made is not None:
            assert number == len(made), "two runs would share a folder"
            made.append(name)
        turn = (next(counted) - 2 * servers[-1]) // len(ROUND)
        slow = 1.0 + 0.3 * turn
        length, longest = 18 + 4 * chance.random(), 40 + 8 * chance.random()
        whole = slow * length**-0.6 * longest**0.2 * (1 + noise * chance.gauss(0, 1))
        return Run(
            whole,
            whole * (1 - (0.0 if name == WHOLE else SHARES.get(name, 0.04))),
            length,
            longest,
        )

    @contextmanager
    def serve() -> Iterator[Make]:
        servers.append(next(started))
        yield run

    servers: list[int] = []
    found = measured(serve, rounds)
    assert len(servers) == -(-rounds // ROUNDS_OF_SERVERS)
    return found


def test_runs_of_a_round_are_in_the_opposite_order_every_other_time() -> None:
    made: list[str] = []
    found = found_of(0.0, 3, made)
    both = {WHOLE, EVERYTHING}
    assert set(made[:2]) == set(made[2 + 2 * len(ROUND) :][:2]) == both, "new servers warm up"
    assert [name for name, _ in found[0]] == list(ROUND)
    assert [name for name, _ in found[1]] == list(ROUND[::-1])
    counted = made[2 : 2 + 2 * len(ROUND)] + made[4 + 2 * len(ROUND) :]
    assert counted == [name for one in found for name, _ in one]
    assert set(ROUND) == set(WITHOUT)
    assert len(details(found)) == 3 * len(ROUND)


def test_shares_are_found_exactly_where_nothing_else_moves() -> None:
    found = found_of(0.0, 3)
    cpu = shares(found, lambda run: run.cpu_seconds)
    assert {name: cpu[name].value for name in PARTS} == pytest.approx(
        {name: SHARES.get(name, 0.04) for name in PARTS}, abs=1e-9
    )
    assert shares(found, lambda run: run.seconds)[EVERYTHING].value == pytest.approx(0.0, abs=1e-9)


def test_intervals_hold_the_share_and_grow_with_the_noise() -> None:
    widths = []
    for noise in (0.01, 0.03):
        found = shares(found_of(noise, 4), lambda run: run.cpu_seconds)
        intervals = {name: found[name].interval for name in PARTS}
        for name, interval in intervals.items():
            assert interval[0] < found[name].value < interval[1]
            assert interval[0] - 0.01 < SHARES.get(name, 0.04) < interval[1] + 0.01
        of_all, of_one = intervals[EVERYTHING], intervals["correction"]
        assert of_all[1] - of_all[0] < of_one[1] - of_one[0], "the sum has more runs"
        widths.append(of_all[1] - of_all[0])
    assert 2 * widths[0] < widths[1]


def test_a_row_for_every_part_after_that_of_the_whole() -> None:
    found = list(rows(found_of(0.01, 2)))
    assert [row["without"] for row in found] == ["-", *PARTS]
    assert [row["runs"] for row in found] == [6, *(2 * ROUND.count(name) for name in PARTS)]
    assert "of the CPU" not in found[0]
    assert {"of the step", "step from", "step to", "of the CPU", "CPU from", "CPU to"} < found[1].keys()
