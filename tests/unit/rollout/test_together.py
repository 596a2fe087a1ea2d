"""Answers that are read together become the turns that each would by itself; each refusal stays that of its own."""

from __future__ import annotations

import asyncio
import copy
import json
import math
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_trm.errors import RecordRejected
from moe_trm.rollout.servers.question import Wanted
from moe_trm.rollout.sglang import reader, together
from moe_trm.rollout.sglang.parse import parse_turn
from moe_trm.rollout.sglang.reader import Reader
from moe_trm.rollout.sglang.together import Received, parse_turns, sound_turns
from moe_trm.types import SampledTurn
from tests.unit.rollout.test_parse import (
    BROKEN,
    EVERYTHING,
    JSON_VALUES,
    MODEL,
    PROMPT,
    READ,
    ROUTES,
    SPANS,
    good,
    payload,
    with_violation,
)

BARE = Wanted(routes=False, mask=False)
CONTEXT = PROMPT.token_ids


def longer() -> dict[str, Any]:
    """Three sampled tokens of two versions, the kept ids in no order."""
    answer = good()
    answer["output_ids"] = [3, 1, 6]
    answer["meta_info"] |= {
        "finish_reason": {"type": "length"},
        "weight_versions": [{"version": "4", "start": 0, "end": 1}, {"version": "7", "start": 1, "end": 3}],
        "output_token_logprobs": [[-2.5, 3, None], [-0.5, 1, None], [-0.25, 6, None]],
        "output_token_sampling_mask": [[3], [5, 1, 0], [6, 2]],
        "output_token_sampling_logprobs": [[0.0], [math.log(value) for value in (0.5, 0.3, 0.2)], [math.log(0.5)] * 2],
        "routed_experts": payload(np.concatenate([ROUTES, ROUTES[1:2]])),
    }
    return answer


def retracted() -> dict[str, Any]:
    answer = good()
    answer["meta_info"]["num_retractions"] = 2
    return answer


def received(*answers: Any) -> list[Received]:
    return [Received(json.dumps(answer).encode(), CONTEXT) for answer in answers]


def alone(one: Received, wanted: Wanted) -> SampledTurn | RecordRejected:
    try:
        return parse_turn(one.body, one.context, MODEL, wanted, start=one.start)
    except RecordRejected as rejection:
        return rejection


def same(found: object, expected: object) -> bool:
    """Equal in every field, and in the types of arrays."""
    if type(found) is not type(expected):
        return False
    if isinstance(found, np.ndarray) and isinstance(expected, np.ndarray):
        return (found.dtype, found.shape, found.tobytes()) == (expected.dtype, expected.shape, expected.tobytes())
    if isinstance(found, RecordRejected) and isinstance(expected, RecordRejected):
        return (found.reason, str(found)) == (expected.reason, str(expected))
    if is_dataclass(found):
        return all(same(getattr(found, one.name), getattr(expected, one.name)) for one in fields(found))
    return found == expected


@pytest.mark.parametrize("wanted", [EVERYTHING, BARE, replace(BARE, routes=True), replace(BARE, mask=True)])
def test_sound_answers_become_the_turns_of_each(wanted: Wanted) -> None:
    answers = received(good(), longer(), retracted(), good())
    turns = sound_turns(answers, MODEL, wanted)
    assert turns is not None
    for one, turn in zip(answers, turns, strict=True):
        assert same(turn, alone(one, wanted))
        assert (turn.routes is not None, turn.sampling_mask is not None) == (wanted.routes, wanted.mask)


def test_the_routes_of_a_later_answer_begin_at_its_first_row() -> None:
    answer = good()
    answer["meta_info"]["routed_experts"] = payload(ROUTES[2:])
    later = Received(json.dumps(answer).encode(), CONTEXT, start=2)
    turns = sound_turns([later, *received(good())], MODEL, EVERYTHING)
    assert turns is not None
    assert turns[0].routes is not None
    assert np.array_equal(turns[0].routes.experts, ROUTES[2:])


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize(("reason", "break_it"), BROKEN)
def test_a_broken_answer_is_refused_and_the_others_are_not(
    reason: str, break_it: Callable[[dict[str, Any]], object], place: int
) -> None:
    """Of a turn alone `version_span` and `retracted` are no faults: that is for the whole sample to say."""
    answers = [good(), longer(), good()]
    answers[place] = good()
    break_it(answers[place])
    bodies = received(*answers)
    found = parse_turns(bodies, MODEL, EVERYTHING)
    assert isinstance(found[place], RecordRejected) == (reason not in ("version_span", "retracted"))
    assert all(same(own, alone(one, EVERYTHING)) for own, one in zip(found, bodies, strict=True))


@settings(max_examples=300)
@given(field=st.sampled_from(["output_ids", *READ]), value=JSON_VALUES, index=st.integers(0, 3), wanted=st.booleans())
def test_whatever_is_changed_is_judged_as_it_is_alone(field: str, value: Any, index: int, wanted: bool) -> None:
    answer = copy.deepcopy(longer())
    holder = answer if field == "output_ids" else answer["meta_info"]
    if isinstance(holder[field], list) and index < len(holder[field]):
        holder[field][index] = value
    else:
        holder[field] = value
    asked = replace(EVERYTHING, partial=wanted, violation="drop" if wanted else "reject")
    bodies = received(good(), answer, good())
    found = parse_turns(bodies, MODEL, asked)
    assert all(same(own, alone(one, asked)) for own, one in zip(found, bodies, strict=True))


def test_rows_that_belong_to_the_next_answer_are_not_taken() -> None:
    """All answers together have as many rows, log-probs and tokens as they should."""
    for name in ("output_token_sampling_mask", "output_token_logprobs"):
        first, second = good(), good()
        names = (name, "output_token_sampling_logprobs") if "mask" in name else (name,)
        for each in names:
            second["meta_info"][each].insert(0, first["meta_info"][each].pop())
        assert sound_turns(received(first, second), MODEL, EVERYTHING) is None


def test_a_violation_is_treated_as_was_asked_for() -> None:
    asked = replace(EVERYTHING, violation="union")
    bodies = received(good(), with_violation())
    sound, mended = parse_turns(bodies, MODEL, asked)
    assert same(sound, alone(bodies[0], asked))
    assert isinstance(mended, SampledTurn)
    assert mended.sampling_mask is not None
    assert mended.sampling_mask.violations == 1


def test_long_answers_are_read_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The arrays of a short one must not hold those of a long one."""
    long = {**longer(), "text": "x" * 500}
    bodies = received(good(), long, good())
    monkeypatch.setattr(together, "SHORT_BYTES", len(bodies[1].body) - 1)
    found = parse_turns(bodies, MODEL, EVERYTHING)
    assert all(same(own, alone(one, EVERYTHING)) for own, one in zip(found, bodies, strict=True))
    first, other, last = (one.tokens.base for one in found if isinstance(one, SampledTurn))
    assert first is last is not None
    assert other is not first


def test_nothing_is_read_as_nothing() -> None:
    assert parse_turns([], MODEL, EVERYTHING) == []


def test_a_reader_gives_each_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def counted(answers: list[Received], *others: Any) -> list[SampledTurn | RecordRejected]:
        calls.append(len(answers))
        return parse_turns(answers, *others)

    monkeypatch.setattr(reader, "parse_turns", counted)
    broken = good()
    broken["output_ids"] = [8, 1]
    bodies = received(good(), broken, longer())

    asked = [(body, EVERYTHING) for body in bodies] + [(bodies[0], BARE)]

    async def run() -> list[Any]:
        one = Reader(MODEL)
        with one.awaiting():
            given_up = asyncio.ensure_future(one.turn(bodies[0], EVERYTHING))
            found = asyncio.gather(*(one.turn(*each) for each in asked), return_exceptions=True)
            await asyncio.sleep(0)
            given_up.cancel()
            return [*await found, await one.turn(bodies[2], EVERYTHING)]

    first, refused, third, bare, later = asyncio.run(run())
    assert calls == [3, 1, 1], "those that came together, of one kind; who gave up is not there any more"
    for own, body, wanted in (
        (first, 0, EVERYTHING),
        (refused, 1, EVERYTHING),
        (third, 2, EVERYTHING),
        (bare, 0, BARE),
    ):
        assert same(own, alone(bodies[body], wanted))
    assert same(later, third)


def test_the_last_answer_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor do those that wait for it."""
    calls: list[int] = []
    monkeypatch.setattr(reader, "MOMENT_S", 3600.0)

    def counted(answers: list[Received], *others: Any) -> list[SampledTurn | RecordRejected]:
        calls.append(len(answers))
        return parse_turns(answers, *others)

    monkeypatch.setattr(reader, "parse_turns", counted)
    bodies = received(good(), longer(), good())

    async def run() -> list[Any]:
        one, answered = Reader(MODEL), asyncio.Event()

        async def asks(body: Received) -> SampledTurn:
            with one.awaiting():
                await answered.wait()
            return await one.turn(body, EVERYTHING)

        alone_at_last = await one.turn(bodies[0], EVERYTHING)
        others = [asyncio.ensure_future(asks(body)) for body in bodies]
        with one.awaiting():
            answered.set()
            done, _ = await asyncio.wait(others, timeout=0.05)
        assert not done
        answered.clear()
        last = asyncio.ensure_future(asks(bodies[1]))
        await asyncio.sleep(0)
        answered.set()
        return [alone_at_last, *await asyncio.gather(*others, last)]

    found = asyncio.run(asyncio.wait_for(run(), 60))
    assert calls == [1, 4]
    for own, body in zip(found, (0, 0, 1, 2, 1), strict=True):
        assert same(own, alone(bodies[body], EVERYTHING))


def test_whoever_waits_is_told_of_any_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(reader, "parse_turns", fail)

    async def run() -> list[Any]:
        one = Reader(MODEL)
        both = (one.turn(body, EVERYTHING) for body in received(good(), good()))
        return await asyncio.gather(*both, return_exceptions=True)

    assert [type(found) for found in asyncio.run(run())] == [MemoryError] * 2


def test_spans_of_two_answers_stay_apart() -> None:
    first, second = good(), good()
    first["meta_info"]["weight_versions"] = SPANS
    turns = sound_turns(received(first, second), MODEL, EVERYTHING)
    assert turns is not None
    assert [(turn.versions.tolist(), turn.recomputed) for turn in turns] == [([4, 5], 1), ([4, 4], 0)]
