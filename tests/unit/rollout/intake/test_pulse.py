"""Processes that hang, and those that are only busy."""

from __future__ import annotations

import os

from hypothesis import given
from hypothesis import strategies as st

from moe_trm.rollout.intake.pulse import Health, Look, Pulse, state_of

SILENT, STUCK = 3, 6


def judged(*looks: Look) -> list[Health]:
    pulse = Pulse(SILENT, STUCK)
    return [pulse.judge(look) for look in looks]


def test_one_that_answers_and_comes_round_is_well() -> None:
    assert judged(Look(True, 1, 5, "S"), Look(True, 2, 5, "S"), Look(True, 3, 6, "R")) == ["well"] * 3


def test_one_that_is_stopped_or_sleeps_without_an_answer_hangs() -> None:
    for state in "TSZ":
        looks = [Look(True, 1, 5, "S"), *[Look(False, 1, 5, state)] * 4]
        assert judged(*looks) == ["well", "busy", "busy", "hung", "hung"]


def test_one_that_waits_for_a_processor_is_busy_however_long_it_takes_to_be_stuck() -> None:
    looks = [Look(True, 1, 5, "S"), *[Look(False, 1, 5, "R")] * 7]
    assert judged(*looks) == ["well", *["busy"] * 5, "hung", "hung"]


def test_one_that_says_it_is_there_but_never_comes_round_is_stuck() -> None:
    looks = [Look(True, 1, 5, "S"), *(Look(True, 1, 5 + n, "R") for n in range(1, 8))]
    assert judged(*looks) == ["well", *["busy"] * 5, "hung", "hung"]


def test_a_late_answer_makes_it_well_again() -> None:
    looks = [Look(True, 1, 5, "S"), *[Look(False, 1, 5, "S")] * 2, Look(True, 2, 6, "S"), Look(False, 2, 6, "S")]
    assert judged(*looks) == ["well", "busy", "busy", "well", "busy"]


@given(st.lists(st.tuples(st.booleans(), st.sampled_from("RSDT")), max_size=40))
def test_whoever_comes_round_between_looks_never_hangs(looks: list[tuple[bool, str]]) -> None:
    pulse = Pulse(1, 1)
    assert all(pulse.judge(Look(answered, turn, 0, state)) != "hung" for turn, (answered, state) in enumerate(looks))


def test_this_process_is_seen_to_compute() -> None:
    ticks, state = state_of(os.getpid())
    assert state == "R"
    while state_of(os.getpid())[0] == ticks:
        sum(range(100_000))
