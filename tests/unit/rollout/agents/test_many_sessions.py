"""Many sessions at once, with clients that hang up, guess keys and send nonsense: nobody sees another's words."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import Any

import aiohttp
import pytest

from moe_trm.rollout.agents.live_session import LiveSession, Policy
from moe_trm.rollout.agents.reader import AnswerReader
from moe_trm.rollout.agents.server import Address, AgentServer
from moe_trm.rollout.sessions.dialogue import Limits
from moe_trm.types import SampledTurn, SamplingParams
from tests.unit.rollout.agents.http_client import Client, Refusal
from tests.unit.rollout.agents.served import LIMIT, PARAMS, TOKENS, user
from tests.unit.rollout.agents.speaking_engine import SpeakingEngine
from tests.unit.rollout.agents.test_tree import check_record

SESSIONS = 200


class EchoEngine(SpeakingEngine):
    """Answers after a while with the secret that its context begins with."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(self.echo)
        self._rng = rng

    def echo(self, context: Sequence[int]) -> list[int]:
        secret = TOKENS.decode_all(context).split("secret ")[1].split("<")[0]
        return [*(token for letter in secret for token in TOKENS.encode_plain(letter)), *TOKENS.stop_token_ids]

    async def turn(
        self, context: Sequence[int], params: SamplingParams, *, start: int = 0, bare: bool = False
    ) -> SampledTurn:
        await asyncio.sleep(self._rng.random() / 20)
        return await super().turn(context, params, start=start, bare=bare)


def test_two_hundred_sessions_stay_apart() -> None:
    rng = random.Random(0)
    addresses: list[Address] = []

    async def one(number: int, session: LiveSession, address: Address) -> int:
        """A session with faults between its turns; the number of answers that it got."""
        secret, got = f"{number}-{rng.randrange(10**6)}", 0
        history = [user(f"secret {secret}")]
        client = Client(address.base_url, address.api_key)
        other = addresses[rng.randrange(len(addresses))]
        stranger = Client(other.base_url, address.api_key if other is not address else "sk-guess")
        try:
            for _ in range(rng.randint(1, 4)):
                match rng.randrange(6):
                    case 0:
                        await refused(stranger.chat(*history), 401)
                    case 1:
                        await refused(client.chat(*history, n=2), 400)
                    case 2:
                        await refused(client.chat(user("x" * LIMIT)), 413)
                    case 3:
                        await hang_up(client.chat(*history, timeout=0.02))
                answer = await client.chat(*history, stream=False)
                content = answer.choices[0].message.content
                assert content == secret
                got += 1
                history += [{"role": "assistant", "content": content}, user("again")]
        finally:
            await client.close()
            await stranger.close()
        return got

    async def go() -> None:
        server = AgentServer("127.0.0.1", 0, max_body_bytes=LIMIT)
        await server.start()
        policy = Policy(EchoEngine(rng), TOKENS, AnswerReader(), Limits(20, 2000))
        sessions = [LiveSession(policy, PARAMS, bare=False) for _ in range(SESSIONS)]
        addresses.extend(server.open(session) for session in sessions)
        try:
            got = await asyncio.gather(
                *(
                    one(number, session, address)
                    for number, (session, address) in enumerate(zip(sessions, addresses, strict=True))
                )
            )
        finally:
            await server.close()
        for number, (session, answers) in enumerate(zip(sessions, got, strict=True)):
            assert not session.failure.done()
            # A client that hung up may have had its answer already: that is a branch.
            assert len(session.tree.nodes) >= answers
            leaf = session.tree.nodes[-1]
            assert len(leaf.path()) == answers
            check_record(leaf)
            text = TOKENS.decode_all(leaf.token_ids)
            assert text.split("secret ")[1].split("-")[0] == str(number)

    asyncio.run(asyncio.wait_for(go(), 300))


async def refused(request: Coroutine[Any, Any, Any], status: int) -> None:
    """The server may not wait for the rest of a body that is too long."""
    with pytest.raises((Refusal, aiohttp.ClientConnectionError)) as caught:
        await request
    assert getattr(caught.value, "status", 413) == status


async def hang_up(request: Coroutine[Any, Any, Any]) -> None:
    with suppress(TimeoutError):
        await request
