"""OpenAI's own client, unmodified: random conversations whose trained ids are the sampled ones."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from typing import Any

import pytest

from moe_trm.rollout.agents.live_session import LiveSession
from tests.unit.rollout.agents.served import PARAMS, TOKENS, TOOL, Served, serving, speaker, user
from tests.unit.rollout.agents.speaking_engine import SpeakingEngine
from tests.unit.rollout.agents.talks import CALLS, spelled, words
from tests.unit.rollout.agents.test_tree import check_record

pytest.importorskip(
    "openai.resources.chat", reason="the openai package, or a part that it needs, is missing", exc_type=ImportError
)
import openai

SESSIONS = 40


def test_random_conversations_of_the_client_are_trained_as_they_were_sampled() -> None:
    rng = random.Random(0)

    def speak(context: Sequence[int]) -> list[int]:
        text = words(rng) + (CALLS["chatml"](rng) if rng.random() < 0.4 else "")
        end = TOKENS.stop_token_ids
        return [*(token for token in spelled(rng, TOKENS, text) if token not in end), *end]

    async def talk(served: Served, session: LiveSession) -> int:
        address = served.server.open(session)
        history: list[Any] = [user(words(rng))]
        tools: Any = [TOOL]
        async with openai.AsyncOpenAI(base_url=address.base_url, api_key=address.api_key, max_retries=0) as client:
            for _ in range(rng.randint(2, 8)):
                answer = await client.chat.completions.create(model="policy", messages=history, tools=tools)
                message = answer.choices[0].message
                history.append(message)
                for call in message.tool_calls or ():
                    assert call.type == "function"
                    assert json.loads(call.function.arguments) == {"a": 1}
                    history.append({"role": "tool", "tool_call_id": call.id, "content": words(rng)})
                if not message.tool_calls:
                    history.append(user(words(rng)))
                if rng.random() < 0.1:
                    del history[1:3]
        for leaf in session.tree.leaves():
            check_record(leaf)
        return sum(
            TOKENS.encode_plain(node.context.text) != node.context.token_ids
            for node in session.tree.nodes
            if node.parent is not None
        )

    async def go() -> None:
        async with serving(SpeakingEngine(speak)) as served:
            shared = served.session._policy
            drifted = [await talk(served, LiveSession(shared, PARAMS, bare=False)) for _ in range(SESSIONS)]
        assert sum(drifted) > 0, "a naive server would have drifted in none of them: the test is too easy"

    asyncio.run(go())


def test_errors_are_those_that_the_client_knows() -> None:
    async def go() -> None:
        async with serving(SpeakingEngine(speaker("hello"))) as served:
            address = served.address
            async with openai.AsyncOpenAI(base_url=address.base_url, api_key=address.api_key, max_retries=0) as client:
                create = client.chat.completions.create
                messages: Any = [user("?")]
                with pytest.raises(openai.BadRequestError, match="another distribution"):
                    await create(model="policy", messages=messages, n=2)
                with pytest.raises(openai.NotFoundError):
                    await create(model="gpt-4o", messages=messages)
                with pytest.raises(openai.AuthenticationError):
                    await client.with_options(api_key="sk-wrong").chat.completions.create(
                        model="policy", messages=messages
                    )
                stream = await create(model="policy", messages=messages, stream=True)
                said = [event.choices[0].delta.content or "" async for event in stream]
                assert "".join(said) == "hello"
                assert [model.id async for model in client.models.list()] == ["policy"]

    asyncio.run(go())
