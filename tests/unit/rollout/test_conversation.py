"""Several answers with tokens of others in between: masks, turns, routes, log-probs and versions of their record."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_trm.errors import RecordRejected
from moe_trm.rollout.servers.question import RequestedFields
from moe_trm.rollout.sessions.dialogue import Dialogue, Limits
from moe_trm.runtime.child import Refused
from moe_trm.sampling_mask.record import SamplingMask
from moe_trm.types import Prompt, RolloutRecord, SamplingParams
from tests.unit.rollout.causal_engine import END, CausalEngine, DigitTokens, next_token, route_row, support

PARAMS = SamplingParams(max_new_tokens=6, stop_token_ids=(END,))
Step = tuple[str, Any]


def dialogue(
    engine: CausalEngine, prompt: Sequence[int] = (5, 6, 7), limits: Limits | None = None, *, bare: bool = False
) -> Dialogue:
    return Dialogue(
        Prompt("p", tuple(prompt)), engine, DigitTokens(), PARAMS, limits or Limits(turns=9, tokens=200), bare=bare
    )


def play(talk: Dialogue, steps: Sequence[Step]) -> list[tuple[int, bool]]:
    """Do `steps` until a limit ends it; every id behind the prompt, and whether it was sampled."""
    seen: list[tuple[int, bool]] = []

    async def go() -> None:
        for op, argument in steps:
            if op == "sample":
                try:
                    turn = await talk("sample", {"stop": argument[1], "max_new_tokens": argument[0]})
                except Refused as refusal:
                    if refusal.kind != "ended":
                        raise
                    return
                seen.extend((token, True) for token in turn["token_ids"])
            else:
                await talk("append_ids", {"token_ids": argument})
                seen.extend((token, False) for token in argument)

    asyncio.run(go())
    return seen


def record_of(talk: Dialogue, *, keep_changed: bool = False) -> RolloutRecord:
    return talk.conversation.record(
        sample_id=3, group_id=1, keep_changed=keep_changed, finish_reason=talk.finish_reason
    )


steps = st.lists(
    st.one_of(
        st.tuples(
            st.just("sample"),
            st.tuples(st.one_of(st.none(), st.integers(1, 8)), st.lists(st.sampled_from("02468ace"), max_size=3)),
        ),
        st.tuples(st.just("append_ids"), st.lists(st.integers(0, 15), max_size=5)),
    ),
    max_size=14,
)


@settings(max_examples=150)
@given(
    prompt=st.lists(st.integers(0, 15), min_size=1, max_size=5),
    steps=steps,
    turns=st.integers(1, 6),
    tokens=st.integers(6, 60),
    versions=st.lists(st.integers(0, 3), min_size=1, max_size=6).map(sorted),
)
def test_any_interleaving_is_recorded_as_it_happened(
    prompt: list[int], steps: list[Step], turns: int, tokens: int, versions: list[int]
) -> None:
    """Nothing is lost, shifted, or attributed to the wrong turn, whoever speaks when and wherever limits cut."""
    engine = CausalEngine(versions)
    talk = dialogue(engine, prompt, Limits(turns, tokens))
    seen = play(talk, steps)
    while seen and not seen[-1][1]:
        seen.pop()
    if not seen:
        with pytest.raises(RecordRejected) as caught:
            record_of(talk)
        assert caught.value.reason == "empty_output"
        return
    record = record_of(talk)
    ids = [*prompt, *(token for token, _ in seen)]
    assert record.tokens.tolist() == ids
    assert record.sampled.tolist() == [False] * len(prompt) + [sampled for _, sampled in seen]
    places = np.flatnonzero(record.sampled)

    # Every sampled token has the numbers of the ids before it, and every forwarded row the routes of the ids up to it.
    assert [next_token(ids[:place]) for place in places] == record.tokens[places].tolist()
    kept, logprobs, full = zip(*(support(ids[:place]) for place in places), strict=True)
    np.testing.assert_allclose(record.full_logprobs, full, rtol=1e-6)
    np.testing.assert_allclose(record.rollout_logprobs, [values[0] for values in logprobs], rtol=1e-6)
    mask = record.sampling_mask
    assert isinstance(mask, SamplingMask)
    mask.validate(record.tokens[places], 16)
    assert [set(row) for row in np.split(mask.ids, mask.offsets[1:-1])] == [set(row) for row in kept]
    assert record.routes is not None
    record.routes.validate(len(ids))
    record.routes.check_tokens(record.tokens, record.origin)
    assert record.routes.covered is None
    expected = np.array([route_row(ids[: row + 1])[[0, 2]] for row in range(len(ids) - 1)])
    assert np.array_equal(record.routes.experts, expected)

    # Turns: 0 up to the end of the first answer, one more after each.
    turn_ids, answers = record.turn_ids.tolist(), 0
    assert turn_ids == sorted(turn_ids)
    assert len(engine.asked) <= turns
    starts = [length for length, _, _ in engine.asked]
    for number, start in enumerate(starts):
        answers += 1
        end = starts[number + 1] if number + 1 < len(starts) else len(ids)
        sampled_here = [place for place in places if start <= place < end]
        assert {turn_ids[place] for place in sampled_here} == {number}
        assert {int(record.versions[list(places).index(place)]) for place in sampled_here} == {
            versions[min(number, len(versions) - 1)]
        }
    assert max(turn_ids) == answers - 1
    # No answer went beyond a limit, and what a limit ended is unfinished.
    assert len(ids) <= max(tokens, starts[-1] + 1)
    assert record.finish_reason in ("stop", "length")
    if talk.ended:
        assert record.finish_reason == "length"


def test_later_answers_ask_for_the_row_of_the_last_sampled_token_and_nothing_before_it() -> None:
    """NeMo-RL#3485: the last token of an answer is forwarded in the answer after.

    A row kept from before would be another token's.
    """
    engine = CausalEngine()
    talk = dialogue(engine)
    play(talk, [("sample", (4, "")), ("append_ids", [9, 9]), ("sample", (3, "")), ("sample", (2, ""))])
    contexts, starts = [asked[0] for asked in engine.asked], [asked[1] for asked in engine.asked]
    ends = [len(talk.conversation.turns[0].tokens) + 3]
    assert starts[0] == 0
    assert starts[1] == ends[0] - 1 == contexts[1] - 3
    assert starts[2] == contexts[2] - 1


@pytest.mark.parametrize("engine", [CausalEngine(stale=True), CausalEngine(skip_rows=1)], ids=["stale row", "gap"])
def test_a_stale_or_missing_row_at_a_seam_rejects_the_sample(engine: CausalEngine) -> None:
    talk = dialogue(engine)
    with pytest.raises(RecordRejected) as caught:
        play(talk, [("sample", (4, "")), ("append_ids", [9]), ("sample", (3, ""))])
    assert caught.value.reason == "route_rows"


def test_routes_of_only_some_answers_are_refused() -> None:
    engine = CausalEngine()
    talk = dialogue(engine)
    play(talk, [("sample", (2, ""))])
    engine.requested = RequestedFields(routes=False, mask=True)
    with pytest.raises(RecordRejected) as caught:
        play(talk, [("sample", (2, ""))])
    assert caught.value.reason == "route_missing"


def test_a_retracted_answer_among_others_is_rejected_or_loses_its_routes() -> None:
    engine = CausalEngine(retractions=[0, 2, 0])
    talk = dialogue(engine, (5, 6, 4))
    play(talk, [("sample", (4, "")), ("append_ids", [9]), ("sample", (3, "")), ("sample", (2, ""))])
    with pytest.raises(RecordRejected) as caught:
        record_of(talk)
    assert (caught.value.reason, caught.value.where) == ("retracted", "turn 1")
    assert "max_total_tokens" in caught.value.fix
    record = record_of(talk, keep_changed=True)
    assert record.routes is not None
    end = 3 + len(talk.conversation.turns[0].tokens) + 1 + len(talk.conversation.turns[1].tokens)
    known = np.arange(record.num_tokens - 1) >= end - 2
    assert record.routes.coverage().tolist() == known.tolist()
    expected = np.array([route_row(record.tokens[: row + 1].tolist())[[0, 2]] for row in np.flatnonzero(known)])
    assert np.array_equal(record.routes.experts[known], expected)


def test_an_evaluation_records_neither_routes_nor_masks() -> None:
    talk = dialogue(CausalEngine(), bare=True)
    play(talk, [("sample", (2, "")), ("append_ids", [9]), ("sample", (2, ""))])
    record = record_of(talk)
    assert record.routes is None
    assert record.sampling_mask is None


def refused(talk: Dialogue, op: str, **arguments: Any) -> str:
    with pytest.raises(Refused) as caught:
        asyncio.run(talk(op, arguments))
    assert caught.value.kind == "usage"
    return str(caught.value)


def test_what_makes_no_sense_is_refused_and_changes_nothing() -> None:
    talk = dialogue(CausalEngine())
    assert "one token" in refused(talk, "sample", stop=["12"], max_new_tokens=None)
    assert "positive" in refused(talk, "sample", stop=[], max_new_tokens=0)
    assert "only text" in refused(talk, "append", text=3)
    assert "0 to 15" in refused(talk, "append_ids", token_ids=[16])
    assert "0 to 15" in refused(talk, "append_ids", token_ids=["1"])
    assert "follow an answer" in refused(talk, "append_messages", messages=[])
    assert talk.conversation.tokens == (5, 6, 7)


def test_one_request_at_a_time() -> None:
    async def go() -> None:
        talk = dialogue(CausalEngine())
        talk._sampling = True
        await talk("append", {"text": "1"})

    with pytest.raises(Refused, match="one request at a time"):
        asyncio.run(go())


def test_messages_close_an_answer_once() -> None:
    engine = CausalEngine()
    talk = dialogue(engine)
    play(talk, [("sample", (1, ""))])
    last = talk.conversation.tokens[-1]
    asyncio.run(talk("append_messages", {"messages": []}))
    assert talk.conversation.tokens[4:] == ((2,) if last == END else (END, 2))
