"""The interface for agents over a real socket, with clients that mean well and with hostile ones."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from moe_trm.errors import EngineError, RecordRejected
from moe_trm.rollout.agents import live_session
from moe_trm.rollout.agents.live_session import LiveSession, Policy
from moe_trm.rollout.agents.reader import AnswerReader
from moe_trm.rollout.agents.server import Address, AgentServer
from moe_trm.rollout.agents.tree import conversation_of
from moe_trm.rollout.sessions.dialogue import Limits
from moe_trm.types import SampledTurn, SamplingParams
from tests.unit.rollout.agents import parsers
from tests.unit.rollout.agents.http_client import Client, Refusal, as_sent
from tests.unit.rollout.agents.speaking_engine import SpeakingEngine
from tests.unit.rollout.agents.templates import tokens_of
from tests.unit.rollout.agents.test_tree import check_record

TOKENS = tokens_of("chatml")
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
PARAMS = SamplingParams(temperature=0.8, top_k=400, max_new_tokens=200, stop_token_ids=TOKENS.stop_token_ids)
LIMIT = 20_000


def speaker(*said: str) -> Callable[[Sequence[int]], list[int]]:
    """Says these texts in turn, the last one ever after, letter by letter: in ids that no tokenizer would choose."""
    left = list(said)

    def speak(context: Sequence[int]) -> list[int]:
        text = left.pop(0) if len(left) > 1 else left[0]
        parts = text.replace("<tool_call>", "\0").replace("</tool_call>", "\1")
        whole = {"\0": "<tool_call>", "\1": "</tool_call>"}
        ids = [token for letter in parts for token in TOKENS.encode_plain(whole.get(letter, letter))]
        return [*ids, TOKENS.stop_token_ids[0]]

    return speak


class Served:
    """A server with one session, and a client of it."""

    def __init__(self, server: AgentServer, session: LiveSession, address: Address) -> None:
        self.server, self.session, self.address = server, session, address
        self.client = Client(address.base_url, address.api_key)
        self.say = self.client.chat


@asynccontextmanager
async def serving(engine: SpeakingEngine, limits: Limits | None = None) -> AsyncIterator[Served]:
    server = AgentServer("127.0.0.1", 0, max_body_bytes=LIMIT)
    await server.start()
    reader = AnswerReader(parsers.hermes, parsers.think)
    session = LiveSession(Policy(engine, TOKENS, reader, limits or Limits(20, 2000)), PARAMS, bare=False)
    served = Served(server, session, server.open(session))
    try:
        yield served
    finally:
        if session.failure.done():
            session.failure.exception()
        await served.client.close()
        await server.close()


def run(test: Callable[[Served], Awaitable[None]], engine: SpeakingEngine, limits: Limits | None = None) -> None:
    async def go() -> None:
        async with serving(engine, limits) as served:
            await test(served)

    asyncio.run(asyncio.wait_for(go(), 60))


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_a_tool_and_the_answer_before_it_continue_on_the_sampled_ids() -> None:
    call = '<think>\nhm\n</think>\n\nI add. <tool_call>\n{"name":"add", "arguments":{"a":1}}\n</tool_call>'

    async def talk(served: Served) -> None:
        history: list[Any] = [user("1 + 1?")]
        first = await served.say(*history, tools=[TOOL], temperature=0.8)
        [choice] = first.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.reasoning_content.strip() == "hm"
        [made] = choice.message.tool_calls
        assert (made.function.name, json.loads(made.function.arguments)) == ("add", {"a": 1})
        history += [as_sent(choice.message), {"role": "tool", "tool_call_id": made.id, "content": "2"}]
        second = await served.say(*history, tools=[TOOL])
        assert second.choices[0].message.content == "It is 2 — naïve, 漢字."
        assert second.choices[0].finish_reason == "stop"
        assert second.system_fingerprint == "weights-0"
        [leaf] = served.session.tree.leaves()
        assert [node.answer.body for node in leaf.path()] == [call, "It is 2 — naïve, 漢字."]
        assert second.usage.prompt_tokens == len(leaf.context.token_ids)
        assert second.usage.completion_tokens == leaf.turn.num_sampled
        check_record(leaf)
        # A server that tokenises the history again would train other ids.
        assert TOKENS.encode_plain(leaf.context.text) != leaf.context.token_ids

    run(talk, SpeakingEngine(speaker(call, "It is 2 — naïve, 漢字.")))


def test_a_stream_says_what_a_whole_answer_says() -> None:
    call = 'I add.<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'

    async def talk(served: Served) -> None:
        events = await served.say(user("?"), tools=[TOOL], stream=True, stream_options={"include_usage": True})
        deltas = [event.choices[0].delta for event in events if event.choices]
        assert "".join(delta.content or "" for delta in deltas) == "I add."
        [found] = [delta.tool_calls[0] for delta in deltas if delta.tool_calls]
        assert (found.index, found.function.name, found.function.arguments) == (0, "add", '{"a": 1}')
        assert [event.choices[0].finish_reason for event in events if event.choices][-1] == "tool_calls"
        assert events[-1].usage.completion_tokens == served.session.tree.nodes[0].turn.num_sampled
        whole = await served.client.complete("Say:", stream=True)
        assert "".join(event.choices[0].text for event in whole) == "hello"

    run(talk, SpeakingEngine(speaker(call, "hello")))


def test_completions_continue_and_carry_log_probs() -> None:
    async def talk(served: Served) -> None:
        complete = served.client.complete
        first = await complete("A:", logprobs=1)
        node = served.session.tree.nodes[0]
        values = first.choices[0].logprobs
        assert values.token_logprobs == pytest.approx(node.turn.full_logprobs.tolist())
        assert "".join(values.tokens) == "hello<|im_end|>"
        await complete("A:hello\nB:")
        assert served.session.tree.nodes[1].parent is node
        check_record(served.session.tree.nodes[1])
        chat = await served.say(user("?"), logprobs=True)
        assert [one.token for one in chat.choices[0].logprobs.content][-1] == "<|im_end|>"

    run(talk, SpeakingEngine(speaker("hello")))


def test_stop_and_max_tokens_end_an_answer() -> None:
    async def talk(served: Served) -> None:
        answer = await served.say(user("?"), stop=["c"])
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("ab", "stop")
        assert answer.choices[0].matched_stop == "c"
        cut = await served.say(user("?"), max_tokens=3, max_completion_tokens=9)
        assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == ("abc", "length")
        assert cut.choices[0].matched_stop is None
        with pytest.raises(Refusal, match="400: a stop text is one token"):
            await served.say(user("?"), stop="Observation:")
        history = [user("?"), {"role": "assistant", "content": "ab"}, user("c?")]
        await served.say(*history)
        # The stop text was sampled, so it stays where it was sampled.
        assert TOKENS.decode_all(served.session.tree.nodes[-1].context.token_ids).startswith(
            "<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\nabc<|im_end|>\n"
        )

    run(talk, SpeakingEngine(speaker("abcdef")))


@pytest.mark.parametrize(
    ("options", "status", "code"),
    [
        ({"n": 2}, 400, "unsupported_parameter"),
        ({"presence_penalty": 0.5}, 400, "unsupported_parameter"),
        ({"logit_bias": {"5": 1}}, 400, "unsupported_parameter"),
        ({"response_format": {"type": "json_object"}}, 400, "unsupported_parameter"),
        ({"tools": [TOOL], "tool_choice": "required"}, 400, "unsupported_parameter"),
        ({"logprobs": True, "top_logprobs": 3}, 400, "unsupported_parameter"),
        ({"guess": 1}, 400, "unknown_parameter"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, 400, None),
        ({"model": "gpt-4o"}, 404, "model_not_found"),
        ({"max_tokens": 0}, 400, None),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, None),
        ({"tools": [{"type": "web_search"}]}, 400, None),
    ],
)
def test_what_would_be_another_policy_or_makes_no_sense_is_refused(
    options: dict[str, Any], status: int, code: str | None
) -> None:
    engine = SpeakingEngine(speaker("hello"))

    async def talk(served: Served) -> None:
        with pytest.raises(Refusal) as caught:
            await served.client._post("chat/completions", {"messages": [user("?")]} | options, 60.0)
        assert (caught.value.status, caught.value.code) == (status, code)
        assert served.session.counts == {"refused": 1}

    run(talk, engine)
    assert engine.asked == []


def test_sampling_settings_of_others_are_overridden_and_named() -> None:
    engine = SpeakingEngine(speaker("hello"))

    async def talk(served: Served) -> None:
        await served.say(user("?"), temperature=0.8, top_p=1.0, presence_penalty=0)
        assert "x-moe-trm-overridden" not in served.client.headers
        await served.say(user("?"), temperature=0, top_p=0.5, seed=1)
        assert served.client.headers["x-moe-trm-overridden"] == "temperature,top_p,seed"
        assert served.session.counts["overridden"] == 1

    run(talk, engine)
    assert {(params.temperature, params.top_p) for params in engine.asked} == {(0.8, 1.0)}


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
        assert served.session.tree.left_out(branches[0]) == branches[1].turn.num_sampled + branches[2].turn.num_sampled

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


def test_malformed_requests_are_answered_and_touch_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Garbage, mutated requests, wrong types, deep nesting, bodies that are too long, other paths and methods."""
    monkeypatch.setattr(live_session, "MAX_REFUSED", 10_000)
    rng = random.Random(0)
    good = json.dumps({"model": "policy", "messages": [user("hi")], "stream": False, "max_tokens": 5}).encode()
    odd: list[Any] = [None, -1, 1.5, "x", [], {}, [[]] * 9, {"a": {}}, True, [None], "\x00", 1 << 70]

    def body(number: int) -> bytes:
        match number % 5:
            case 0:
                return rng.randbytes(rng.randrange(200))
            case 1:
                mutated = bytearray(good)
                for _ in range(rng.randrange(1, 6)):
                    mutated[rng.randrange(len(mutated))] = rng.randrange(256)
                return bytes(mutated)
            case 2:
                names = ("messages", "tools", "stop", "stream_options", "logprobs", "tool_choice", "temperature")
                wrong = {name: rng.choice(odd) for name in rng.sample(names, 3)}
                return json.dumps({"model": "policy", "messages": [user("hi")]} | wrong).encode()
            case 3:
                return b'{"messages":' + b"[" * rng.randrange(10, 9000)
            case _:
                return b" " * (LIMIT + 1)

    async def talk(served: Served) -> None:
        other = LiveSession(served.session._policy, PARAMS, bare=False)
        served.server.open(other)
        statuses = set()
        headers = {"Authorization": f"Bearer {served.address.api_key}"}
        async with aiohttp.ClientSession(headers=headers) as session:
            for number in range(300):
                path = rng.choice(["chat/completions", "chat/completions", "completions"])
                async with session.post(f"{served.address.base_url}/{path}", data=body(number)) as response:
                    answer = await response.json()
                    statuses.add(response.status)
                    assert response.status == 200 or answer["error"]["message"]
            for path, status in (("embeddings", 404), ("chat/completions", 405), ("../../x", 404)):
                async with session.get(f"{served.address.base_url}/{path}") as response:
                    assert response.status == status
                    assert (await response.json())["error"]["type"]
        assert statuses <= {200, 400, 404, 413}
        assert {400, 413} <= statuses
        assert not served.session.failure.done()
        assert not other.tree.nodes
        answer = await served.say(user("still there?"))
        assert answer.choices[0].message.content == "hello"
        check_record(served.session.tree.nodes[-1])

    run(talk, SpeakingEngine(speaker("hello")), Limits(1000, 2000))


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
