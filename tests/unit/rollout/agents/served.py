"""A server with one session on a real socket, an engine that says what a test wants, and a client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from moe_trm.rollout.agents.live_session import LiveSession, Policy
from moe_trm.rollout.agents.reader import AnswerReader
from moe_trm.rollout.agents.server import Address, AgentServer
from moe_trm.rollout.sessions.dialogue import Limits
from moe_trm.types import SamplingParams
from tests.unit.rollout.agents import parsers
from tests.unit.rollout.agents.http_client import Client
from tests.unit.rollout.agents.speaking_engine import SpeakingEngine
from tests.unit.rollout.agents.templates import tokens_of

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

    asyncio.run(asyncio.wait_for(go(), 600))


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}
