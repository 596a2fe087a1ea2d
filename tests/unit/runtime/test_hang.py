"""Processes that hang, and those that are only busy."""

from __future__ import annotations

import os

from hypothesis import given
from hypothesis import strategies as st

from moe_trm.runtime.hang import HangDetector, Health, Observation, state_of

SILENT, STUCK = 3, 6


def judged(*looks: Observation) -> list[Health]:
    detector = HangDetector(SILENT, STUCK)
    return [detector.judge(look) for look in looks]


def test_one_that_answers_and_comes_round_is_well() -> None:
    assert judged(Observation(True, 5, "S"), Observation(True, 5, "S"), Observation(True, 6, "R")) == ["well"] * 3


def test_one_that_is_stopped_or_sleeps_without_an_answer_hangs() -> None:
    for state in "TSZ":
        looks = [Observation(True, 5, "S"), *[Observation(False, 5, state)] * 4]
        assert judged(*looks) == ["well", "busy", "busy", "hung", "hung"]


def test_one_that_waits_for_a_processor_is_busy_however_long_it_takes_to_be_stuck() -> None:
    looks = [Observation(True, 5, "S"), *[Observation(False, 5, "R")] * 7]
    assert judged(*looks) == ["well", *["busy"] * 5, "hung", "hung"]


def test_a_late_answer_makes_it_well_again() -> None:
    looks = [
        Observation(True, 5, "S"),
        *[Observation(False, 5, "S")] * 2,
        Observation(True, 6, "S"),
        Observation(False, 6, "S"),
    ]
    assert judged(*looks) == ["well", "busy", "busy", "well", "busy"]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 2), st.sampled_from("RSDT")), max_size=40))
def test_only_one_that_was_silent_for_long_hangs(looks: list[tuple[bool, int, str]]) -> None:
    health = judged(*(Observation(*look) for look in looks))
    for place, (own, (answered, _, _)) in enumerate(zip(health, looks, strict=True)):
        assert (own == "well") == answered
        silent = place + 1 >= SILENT and not any(look[0] for look in looks[place + 1 - SILENT : place + 1])
        assert own != "hung" or silent


def test_this_process_is_seen_to_compute() -> None:
    ticks, state = state_of(os.getpid())
    assert state == "R"
    while state_of(os.getpid())[0] == ticks:
        sum(range(100_000))
