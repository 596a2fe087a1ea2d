"""An agent, or somebody on the network beside it, cannot stop the controller by long texts and silent connections."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import threading
from urllib.parse import urlsplit

import aiohttp
import pytest
from pydantic import ValidationError

from moe_trm.rollout.agents import server as agent_server
from moe_trm.rollout.service import MOST_FILES, Start, _main
from moe_trm.rollout.sessions.dialogue import Limits
from tests.unit.rollout.agents.http_client import Refusal
from tests.unit.rollout.agents.served import TOKENS, Served, run, speaker, user
from tests.unit.rollout.agents.speaking_engine import SpeakingEngine

MOST = 100


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    encode, longest = TOKENS.encode_plain, MOST * TOKENS.longest_token

    def bounded(text: str) -> tuple[int, ...]:
        assert len(text) <= longest, "a long text was tokenised"
        return encode(text)

    monkeypatch.setattr(TOKENS, "encode_plain", bounded)

    async def talk(served: Served) -> None:
        long = "a " * longest
        for request in (served.say(user(long)), served.client.complete(long)):
            with pytest.raises(Refusal, match="characters has more than 100 tokens") as caught:
                await request
            assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")
        assert served.session.ended
        assert not served.session.failure.done()

    run(talk, SpeakingEngine(speaker("hello")), Limits(20, MOST))


def test_other_requests_are_answered_while_a_text_is_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    encode, begun, over, waited = TOKENS.encode_plain, threading.Event(), threading.Event(), []

    def slow(text: str) -> tuple[int, ...]:
        begun.set()
        waited.append(over.wait(60))
        over.set()  # where the loop stood still meanwhile, it does so once
        return encode(text)

    async def talk(served: Served) -> None:
        monkeypatch.setattr(TOKENS, "encode_plain", slow)
        asking = asyncio.ensure_future(served.say(user("?")))
        await asyncio.to_thread(begun.wait, 60)
        assert await served.client.models() == ["policy"]
        over.set()
        assert (await asking).choices[0].message.content == "hello"
        assert all(waited)

    run(talk, SpeakingEngine(speaker("hello")))


def test_a_session_that_ends_while_its_text_is_tokenised_asks_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    encode, begun, over = TOKENS.encode_plain, threading.Event(), threading.Event()

    def slow(text: str) -> tuple[int, ...]:
        begun.set()
        over.wait(60)
        return encode(text)

    engine = SpeakingEngine(speaker("hello"))

    async def talk(served: Served) -> None:
        monkeypatch.setattr(TOKENS, "encode_plain", slow)
        asking = asyncio.ensure_future(served.say(user("?")))
        await asyncio.to_thread(begun.wait, 60)
        served.session.restart()
        over.set()
        await asyncio.gather(asking, return_exceptions=True)
        assert not served.session.tree.nodes
        assert not served.session.counts["requests"]

    run(talk, engine)


async def strangers(served: Served, number: int) -> list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Connections that send the beginning of a request, and no more."""
    address = urlsplit(served.address.base_url)
    opened = [await asyncio.open_connection(address.hostname, address.port) for _ in range(number)]
    for _, writer in opened[::2]:
        writer.write(b"POST /sessions/x/v1/chat/completions HTTP/1.1\r\nHost: x\r\n")
    return opened


async def ends(opened: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]) -> None:
    for reader, writer in opened:
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 300) == b""
        writer.close()


def test_a_connection_that_shows_no_key_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_server, "SILENT_S", 0.3)

    async def talk(served: Served) -> None:
        await served.client.models()
        kept = set(served.server._runner.server.connections)
        await ends(await strangers(served, 6))
        assert kept <= set(served.server._runner.server.connections)
        assert not served.server._strangers

    run(talk, SpeakingEngine(speaker("hello")))


def test_many_silent_connections_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_server, "MAX_STRANGERS", 4)

    async def talk(served: Served) -> None:
        opened = await strangers(served, 40)
        assert await served.client.models() == ["policy"]
        await ends(opened[:30])
        assert len(served.server._strangers) <= 4
        for _, writer in opened[30:]:
            writer.close()

    run(talk, SpeakingEngine(speaker("hello")))


def test_what_cannot_be_read_is_refused_as_such() -> None:
    """It is the client's fault, and no fault of the policy's server."""
    deep = '{"a":' * 1500 + "1" + "}" * 1500
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": deep}}]
    asked = {"messages": [user("?"), {"role": "assistant", "content": "", "tool_calls": calls}, user("?")]}

    async def talk(served: Served) -> None:
        headers = {"Authorization": f"Bearer {served.address.api_key}", "Content-Type": "application/json"}
        url = f"{served.address.base_url}/chat/completions"
        for body, encoding in ((json.dumps(asked), None), ("no gzip", "gzip"), ("no zlib", "deflate")):
            more = {"Content-Encoding": encoding} if encoding else {}
            async with (
                aiohttp.ClientSession(headers=headers | more) as client,
                client.post(url, data=body) as response,
            ):
                assert response.status == 400
        assert not served.session.failure.done()

    run(talk, SpeakingEngine(speaker("hello")))


def test_malformed_requests_do_not_fill_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(agent_server, "MAX_LOGGED", agent_server._http_log.filters[0].num_logged + 2)

    async def talk(served: Served) -> None:
        for _ in range(6):
            [(reader, writer)] = await strangers(served, 1)
            writer.write(b"\x00 nonsense\r\n\r\n" * 3)
            with contextlib.suppress(ConnectionError):
                await asyncio.wait_for(reader.read(), 300)
            writer.close()

    run(talk, SpeakingEngine(speaker("hello")))
    assert len([record for record in caplog.records if record.name == agent_server._http_log.name]) <= 2


def test_the_controller_takes_as_many_connections_as_it_may() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(before[0], 900), before[1]))
        with pytest.raises(ValidationError):
            asyncio.run(_main(Start("", "", {}, None)))  # it gets as far as its configuration
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert soft == (min(hard, MOST_FILES) if hard >= 0 else MOST_FILES)
        assert hard == before[1]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
