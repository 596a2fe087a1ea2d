"""The interface for agents with clients and engines that fail, and with hostile clients."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import aiohttp
import pytest

from moe_trm.errors import EngineError, RecordRejected
from moe_trm.rollout.agents import live_session
from moe_trm.rollout.agents.live_session import LiveSession
from moe_trm.rollout.agents.tree import conversation_of
from moe_trm.rollout.sessions.dialogue import Limits
from moe_trm.types import SampledTurn, SamplingParams
from tests.unit.rollout.agents.http_client import Refusal
from tests.unit.rollout.agents.made_sessions import rows_of
from tests.unit.rollout.agents.served import PARAMS, TOOL, Served, run, speaker, user
from tests.unit.rollout.agents.speaking_engine import SpeakingEngine
from tests.unit.rollout.agents.test_tree import check_record


def test_a_key_opens_its_own_session_while_that_lasts() -> None:
    async def talk(served: Served) -> None:
        other = LiveSession(served.session._policy, PARAMS, bare=False)
        address = served.server.open(other)
        assert address.api_key != served.address.api_key
        for key in ("", "sk-", address.api_key, served.address.api_key[:-1], served.address.api_key + "x", "é"):
            headers = {"Authorization": f"Bearer {key}"}
            async with aiohttp.ClientSession(headers=headers) as session:
                for method, path in (("POST", "chat/completions"), ("POST", "completions"), ("GET", "models")):
                    async with session.request(method, f"{served.address.base_url}/{path}", json={}) as response:
                        assert response.status == 401
                        assert (await response.json())["error"]["code"] == "invalid_api_key"
        assert await served.client.models() == ["policy"]
        served.server.end(served.address)
        with pytest.raises(Refusal, match="401"):
            await served.say(user("?"))
        assert not other.tree.nodes
        assert not served.session.tree.nodes
        assert not other.counts

    run(talk, SpeakingEngine(speaker("hello")))


def test_limits_end_a_session_with_errors_that_clients_do_not_repeat() -> None:
    async def talk(served: Served) -> None:
        await served.say(user("?"))
        await served.say(user("?"))
        with pytest.raises(Refusal, match="max_turns allows 2") as caught:
            await served.say(user("?"))
        assert caught.value.code == "turn_limit"
        assert served.session.ended

    async def long(served: Served) -> None:
        answer = await served.say(user("?"))
        assert answer.usage.total_tokens == 20
        assert answer.choices[0].finish_reason == "length"
        assert not served.session.ended
        with pytest.raises(Refusal, match="max_tokens allows 20") as caught:
            await served.say(user("?" * 90))
        assert caught.value.code == "context_length_exceeded"
        assert served.session.ended

    run(talk, SpeakingEngine(speaker("hello")), Limits(2, 2000))
    run(long, SpeakingEngine(speaker("a long answer, a long answer")), Limits(9, 20))


def test_parallel_requests_are_branches_and_too_many_are_told_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_session, "MAX_IN_FLIGHT", 3)
    engine = SpeakingEngine(speaker("a", "b", "c"))

    async def talk(served: Served) -> None:
        await served.say(user("?"))
        engine.wait.clear()
        history = [user("?"), {"role": "assistant", "content": "a"}]
        asked = [asyncio.ensure_future(served.say(*history, user(f"part {number}"))) for number in range(3)]
        while len(engine.asked) < 4:
            await asyncio.sleep(0.01)
        with pytest.raises(Refusal, match="429"):
            await served.say(*history, user("part 4"))
        engine.wait.set()
        await asyncio.gather(*asked)
        root, *branches = served.session.tree.nodes
        assert {node.parent for node in branches} == {root}
        for leaf in served.session.tree.leaves():
            check_record(leaf)
        left_out = rows_of(served.session.tree, "last").left_out
        assert left_out == branches[0].turn.num_sampled + branches[1].turn.num_sampled

    run(talk, engine)


def test_a_client_that_hangs_up_leaves_nothing_and_gets_its_turn_back() -> None:
    engine = SpeakingEngine(speaker("hello"))

    async def talk(served: Served) -> None:
        engine.wait.clear()
        with pytest.raises(TimeoutError):
            await served.say(user("?"), timeout=0.2)
        while served.session._tasks:
            await asyncio.sleep(0.01)
        engine.wait.set()
        assert served.session.tree.nodes == []
        await served.say(user("?"))
        assert len(served.session.tree.nodes) == 1
        assert not served.session.failure.done()

    run(talk, engine, Limits(1, 2000))


@pytest.mark.parametrize("error", [EngineError("gone"), RecordRejected("route_rows", "too short")])
def test_a_fault_of_the_engine_ends_the_sample_whatever_the_agent_does(error: Exception) -> None:
    class Faulty(SpeakingEngine):
        async def turn(
            self, context: Sequence[int], params: SamplingParams, *, start: int = 0, bare: bool = False
        ) -> SampledTurn:
            raise error

    async def talk(served: Served) -> None:
        with pytest.raises(Refusal, match="500"):
            await served.say(user("?"))
        assert served.session.failure.exception() is error

    run(talk, Faulty(speaker("")))


def test_a_flood_of_refused_requests_costs_the_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_session, "MAX_REFUSED", 5)

    async def talk(served: Served) -> None:
        for _ in range(6):
            assert not served.session.failure.done()
            with pytest.raises(Refusal, match="400"):
                await served.say(user("?"), n=3)
        failure = served.session.failure.exception()
        assert isinstance(failure, RecordRejected)
        assert failure.reason == "rollout_flood"

    run(talk, SpeakingEngine(speaker("")))


def test_an_answer_that_the_parser_cannot_read_costs_the_sample() -> None:
    async def talk(served: Served) -> None:
        with pytest.raises(Refusal, match="500"):
            await served.say(user("?"), tools=[TOOL])
        failure = served.session.failure.exception()
        assert isinstance(failure, RecordRejected)
        assert failure.reason == "rollout_parser"

    # A call without a name: valid JSON, and no call.
    run(talk, SpeakingEngine(speaker('<tool_call>{"arguments": {}}</tool_call>')))


def test_a_repeated_call_begins_with_nothing_said() -> None:
    engine = SpeakingEngine(speaker("hello"))

    async def talk(served: Served) -> None:
        await served.say(user("?"))
        engine.wait.clear()
        late = asyncio.ensure_future(served.say(user("late")))
        while len(engine.asked) < 2:
            await asyncio.sleep(0.01)
        served.session.restart()
        engine.wait.set()
        with pytest.raises(aiohttp.ClientError):
            await late
        assert served.session.tree.nodes == []
        await served.say(user("?"))
        [leaf] = served.session.tree.leaves()
        record = conversation_of(leaf, "p").record(sample_id=0, group_id=0, keep_changed=False)
        assert record.num_sampled == len("hello") + 1

    run(talk, engine, Limits(2, 2000))
