"""The packages of OpenAI and Anthropic, unmodified, over Messages and Responses: whole, streamed, tools, refusals."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from moe_trm.rollout.agents.live_session import LiveSession
from tests.unit.rollout.agents.served import PARAMS, TOKENS, Served, serving, speaker
from tests.unit.rollout.agents.speaking_engine import SpeakingEngine
from tests.unit.rollout.agents.talks import words
from tests.unit.rollout.agents.test_dialects import random_speaker
from tests.unit.rollout.agents.test_tree import check_record

pytest.importorskip(
    "openai.resources.chat", reason="the openai package, or a part that it needs, is missing", exc_type=ImportError
)
import openai

anthropic: Any = pytest.importorskip("anthropic", reason="the anthropic package, or a part that it needs, is missing")

SCHEMA: dict[str, Any] = {"type": "object", "properties": {}}
CALL = '<tool_call>\n{"name":"add", "arguments":{"a":1}}\n</tool_call>'
SESSIONS = 12


def with_clients(engine: SpeakingEngine, talk: Callable[[Served, openai.AsyncOpenAI, Any], Awaitable[None]]) -> None:
    async def go() -> None:
        async with serving(engine) as served:
            address = served.address
            root = address.base_url.removesuffix("/v1")
            async with (
                openai.AsyncOpenAI(base_url=address.base_url, api_key=address.api_key, max_retries=0) as ours,
                anthropic.AsyncAnthropic(base_url=root, api_key=address.api_key, max_retries=0) as theirs,
            ):
                await talk(served, ours, theirs)
            for leaf in served.session.tree.leaves():
                check_record(leaf)
            assert not served.session.failure.done()

    asyncio.run(go())


def test_random_conversations_of_anthropics_client_go_on_behind_the_sampled_ids() -> None:
    rng = random.Random(0)

    async def talk(served: Served, session: LiveSession) -> None:
        address = served.server.open(session)
        root = address.base_url.removesuffix("/v1")
        history: list[Any] = [{"role": "user", "content": words(rng)}]
        tools: Any = [{"name": "add", "input_schema": SCHEMA}]
        async with anthropic.AsyncAnthropic(base_url=root, auth_token=address.api_key, max_retries=0) as client:
            for number in range(rng.randint(2, 5)):
                asked: Any = {"model": "policy", "max_tokens": 500, "messages": history, "tools": tools}
                if number % 2:
                    async with client.messages.stream(**asked, system="be brief") as stream:
                        answer: Any = await stream.get_final_message()
                else:
                    answer = await client.messages.create(**asked, system="be brief")
                history.append({"role": "assistant", "content": answer.content})
                results = [
                    {"type": "tool_result", "tool_use_id": block.id, "content": words(rng)}
                    for block in answer.content
                    if block.type == "tool_use"
                ]
                assert (answer.stop_reason == "tool_use") == bool(results)
                history.append({"role": "user", "content": results or words(rng)})
        for leaf in session.tree.leaves():
            check_record(leaf)
        assert not session.tree.counts["thinking_dropped"]
        assert not session.tree.counts["thinking_edited"]

    async def go() -> None:
        async with serving(SpeakingEngine(random_speaker(0))) as served:
            for _ in range(SESSIONS):
                await talk(served, LiveSession(served.session._policy, PARAMS, bare=False))

    asyncio.run(go())


def test_random_conversations_of_openais_client_over_responses_go_on_behind_the_sampled_ids() -> None:
    rng = random.Random(0)

    async def talk(served: Served, session: LiveSession, *, stored: bool) -> None:
        address = served.server.open(session)
        items: list[Any] = [{"role": "user", "content": words(rng)}]
        tools: Any = [{"type": "function", "name": "add", "parameters": SCHEMA, "strict": False}]
        previous: str | None = None
        async with openai.AsyncOpenAI(base_url=address.base_url, api_key=address.api_key, max_retries=0) as client:
            for number in range(rng.randint(2, 5)):
                asked: Any = {"model": "policy", "input": items, "tools": tools, "previous_response_id": previous}
                if number % 2:
                    async with client.responses.stream(**asked) as stream:
                        answer: Any = await stream.get_final_response()
                else:
                    answer = await client.responses.create(**asked)
                assert answer.usage.input_tokens == len(session.tree.nodes[-1].context.token_ids)
                new: list[Any] = [
                    {"type": "function_call_output", "call_id": item.call_id, "output": words(rng)}
                    for item in answer.output
                    if item.type == "function_call"
                ] or [{"role": "user", "content": words(rng)}]
                previous = answer.id if stored else None
                items = new if stored else [*items, *answer.output, *new]
        for leaf in session.tree.leaves():
            check_record(leaf)
        assert not session.tree.counts["thinking_dropped"]
        assert not session.tree.counts["thinking_edited"]

    async def go() -> None:
        async with serving(SpeakingEngine(random_speaker(0))) as served:
            for number in range(SESSIONS):
                await talk(served, LiveSession(served.session._policy, PARAMS, bare=False), stored=number % 2 == 0)

    asyncio.run(go())


def test_parallel_calls_thinking_and_counts_over_messages() -> None:
    async def talk(served: Served, _: openai.AsyncOpenAI, client: Any) -> None:
        tools: Any = [{"name": "add", "description": "adds", "input_schema": SCHEMA}]
        history: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "1 + 1?"}]}]
        asked: Any = {"model": "policy", "messages": history, "tools": tools}
        counted = await client.messages.count_tokens(**asked)
        seen = []
        async with client.messages.stream(max_tokens=200, **asked) as stream:
            async for event in stream:
                seen.append(event.type)
            answer = await stream.get_final_message()
        assert counted.input_tokens == answer.usage.input_tokens == len(served.session.tree.nodes[0].context.token_ids)
        assert [block.type for block in answer.content] == ["thinking", "text", "tool_use", "tool_use"]
        assert seen[0] == "message_start"
        assert seen[-1] == "message_stop"
        history.append({"role": "assistant", "content": answer.content})
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": "2"}
            for block in answer.content
            if block.type == "tool_use"
        ]
        history.append({"role": "user", "content": [*results, {"type": "text", "text": "And?"}]})
        last = await client.messages.create(max_tokens=100, thinking={"type": "adaptive"}, **asked)
        assert last.content[0].type == "text"
        assert last.content[0].text == "It is 2."
        assert [model.id async for model in client.models.list()] == ["policy"]

    said = speaker(f"<think>\nhm\n</think>\n\nI add. {CALL}\n{CALL}", "It is 2.")
    with_clients(SpeakingEngine(said), talk)


def test_anthropics_own_loop_over_tools_goes_on_with_whole_histories() -> None:
    """It asks for a conversation that the server keeps, and does without."""
    results = []

    async def add(a: int) -> str:
        results.append(a)
        return "2"

    async def talk(served: Served, _: openai.AsyncOpenAI, client: Any) -> None:
        question: Any = [{"role": "user", "content": "1 + 1?"}]
        tools = [anthropic.beta_async_tool(add, name="add", description="adds")]
        asked: Any = {"model": "policy", "max_tokens": 200, "messages": question, "tools": tools}
        answers = [answer async for answer in client.beta.messages.tool_runner(**asked)]
        assert answers[-1].content[0].text == "It is 2."
        assert results == [1]
        [leaf] = served.session.tree.leaves()
        assert [node.dialect for node in leaf.path()] == ["messages"] * 2
        assert served.session.counts["refused"] == 1

    with_clients(SpeakingEngine(speaker(f"I add. {CALL}", "It is 2.")), talk)


def test_refusals_are_those_that_the_clients_know() -> None:
    async def talk(served: Served, ours: openai.AsyncOpenAI, theirs: Any) -> None:
        asked: Any = {"model": "policy", "max_tokens": 9, "messages": [{"role": "user", "content": "?"}]}
        tools: Any = [{"name": "a", "input_schema": SCHEMA}]
        with pytest.raises(anthropic.BadRequestError, match="another distribution"):
            await theirs.messages.create(**asked, tools=tools, tool_choice={"type": "any"})
        with pytest.raises(anthropic.NotFoundError):
            await theirs.messages.create(**asked | {"model": "claude-opus-4"})
        with pytest.raises(anthropic.AuthenticationError):
            await theirs.with_options(api_key="sk-wrong").messages.create(**asked)
        source: Any = {"type": "base64", "media_type": "image/png", "data": "AA=="}
        image: Any = [{"role": "user", "content": [{"type": "image", "source": source}]}]
        with pytest.raises(anthropic.BadRequestError, match="only blocks of type text"):
            await theirs.messages.create(**asked | {"messages": image})
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
            await theirs.messages.create(**asked | {"messages": [{"role": "user", "content": "? " * 3000}]})
        with pytest.raises(anthropic.RequestTooLargeError):
            await theirs.messages.create(**asked | {"messages": [{"role": "user", "content": "? " * 30000}]})
        picture: Any = [{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}]
        with pytest.raises(openai.BadRequestError, match="only parts of text"):
            await ours.responses.create(model="policy", input=picture)
        with pytest.raises(openai.BadRequestError, match="another distribution"):
            await ours.responses.create(model="policy", input="?", text={"format": {"type": "json_object"}})
        with pytest.raises(openai.NotFoundError, match="is stored in this session"):
            await ours.responses.create(model="policy", input="?", previous_response_id="resp_1")
        with pytest.raises(openai.AuthenticationError):
            await ours.with_options(api_key="sk-wrong").responses.create(model="policy", input="?")
        answer = await ours.responses.create(model="policy", input="?", reasoning={"effort": "low"}, store=False)
        assert answer.output_text == "hello"
        assert len(served.session.tree.nodes) == 1

    with_clients(SpeakingEngine(speaker("hello")), talk)


def test_one_session_in_every_dialect_is_one_tree() -> None:
    """An agent may change its client in the middle: the conversation goes on behind the same ids."""

    async def talk(served: Served, ours: openai.AsyncOpenAI, theirs: Any) -> None:
        first = await ours.responses.create(model="policy", input="a")
        history: Any = [{"role": "user", "content": "a"}, {"role": "assistant", "content": first.output_text}]
        history.append({"role": "user", "content": "b"})
        second = await theirs.messages.create(model="policy", max_tokens=50, messages=history)
        assert second.content[0].type == "text"
        history += [{"role": "assistant", "content": second.content[0].text}, {"role": "user", "content": "c"}]
        await ours.chat.completions.create(model="policy", messages=history)
        [leaf] = served.session.tree.leaves()
        assert [node.dialect for node in leaf.path()] == ["responses", "messages", "chat"]
        assert TOKENS.encode_plain(leaf.context.text) != leaf.context.token_ids

    with_clients(SpeakingEngine(speaker("hello")), talk)
