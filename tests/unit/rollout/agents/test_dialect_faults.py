"""Hostile clients of every dialect: typed answers in its own form, nothing lost, nothing of another session."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from moe_trm.rollout.agents import live_session
from moe_trm.rollout.agents.live_session import LiveSession
from moe_trm.rollout.agents.parameters import IGNORED, OF_THE_RUN, REFUSED
from moe_trm.rollout.sessions.dialogue import Limits
from tests.unit.rollout.agents.dialect_clients import CLIENTS, ChatClient, Refused
from tests.unit.rollout.agents.served import LIMIT, PARAMS, TOOL, Served, run, speaker, user
from tests.unit.rollout.agents.speaking_engine import SpeakingEngine
from tests.unit.rollout.agents.test_tree import check_record

REQUESTS = 1000
ODD: list[Any] = [None, -1, 1.5, "x", "", [], {}, [[]] * 9, {"a": {}}, True, [None], "\x00", 1 << 70, "\ud800", [{}]]
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
HISTORY: list[dict[str, Any]] = [
    {"role": "system", "content": "be brief"},
    user("hi"),
    {"role": "assistant", "content": "I add.", "reasoning_content": "so", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "2"},
]
PATHS = {
    "chat/completions": "chat",
    "completions": "chat",
    "messages": "messages",
    "messages/count_tokens": "messages",
    "responses": "responses",
}


def good_body(path: str) -> dict[str, Any]:
    """A request with everything in it."""
    if path == "completions":
        return {"model": "policy", "prompt": "hi", "stop": ["c"], "max_tokens": 5, "logprobs": 1}
    client = CLIENTS[PATHS[path]]
    body = client.body(client.__new__(client), deepcopy(HISTORY), [TOOL])
    return {"model": "policy", "stream": False, **body, "metadata": {}, "chat_template_kwargs": {"a": 1}}


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every place in JSON, as its container and its key."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from places(value[key])


def mutated(rng: random.Random, body: dict[str, Any]) -> dict[str, Any]:
    """The body with another value, a missing one, or another name in some places."""
    made: dict[str, Any] = deepcopy(body)
    for _ in range(rng.randrange(1, 4)):
        container, key = rng.choice([*places(made)])
        match rng.randrange(4):
            case 0:
                del container[key]
            case 1 if isinstance(container, dict):
                container[rng.choice(["type", "role", "content", "input", "x", "text"])] = deepcopy(rng.choice(ODD))
            case 2:
                container[key] = deepcopy(rng.choice([*places(body)])[0])
            case _:
                container[key] = deepcopy(rng.choice(ODD))
    return made


def fuzzed(rng: random.Random, path: str, number: int) -> bytes:
    body = good_body(path)
    match number % 10:
        case 0:
            return rng.randbytes(rng.randrange(200))
        case 1:
            data = bytearray(json.dumps(body).encode())
            for _ in range(rng.randrange(1, 6)):
                data[rng.randrange(len(data))] = rng.randrange(256)
            return bytes(data)
        case 2:
            key = rng.choice([*body])
            return b'{"model": "policy", "%b":' % key.encode() + b"[" * rng.randrange(10, 9000)
        case 3:
            return b" " * (LIMIT + 1)
        case _:
            return json.dumps(mutated(rng, body)).encode()


def is_refusal(path: str, body: Any) -> bool:
    """True for a refusal in the dialect's own form."""
    error = body["error"]
    of_messages = body.get("type") == "error"
    return bool(error["message"]) and isinstance(error["type"], str) and of_messages == path.startswith("messages")


@pytest.mark.parametrize("path", PATHS)
def test_a_thousand_malformed_requests_are_answered_and_touch_nothing(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Garbage, wrong types at any place, deep nesting, bodies that are too long."""
    monkeypatch.setattr(live_session, "MAX_REFUSED", 10_000)
    rng = random.Random(path)

    async def talk(served: Served) -> None:
        bystander = LiveSession(served.session._policy, PARAMS, bare=False)
        served.server.open(bystander)
        statuses = {200: 0, 400: 0, 404: 0, 413: 0}
        async with aiohttp.ClientSession(headers={"x-api-key": served.address.api_key}) as http:
            url = f"{served.address.base_url}/{path}"
            async with http.post(url, json=good_body(path)) as response:
                assert response.status == 200
            for number in range(REQUESTS):
                async with http.post(url, data=fuzzed(rng, path, number)) as response:
                    statuses[response.status] += 1
                    if response.status != 200:
                        assert is_refusal(path, await response.json())
            async with http.get(url) as response:
                assert response.status == 405
                assert is_refusal(path, await response.json())
        assert min(statuses[400], statuses[413]) >= REQUESTS // 10
        assert not served.session.failure.done()
        assert not bystander.tree.nodes
        assert not bystander.counts
        assert served.session.counts["refused"] == REQUESTS - statuses[200]
        answers = 0 if path.endswith("count_tokens") else 1 + statuses[200]
        assert len(served.session.tree.nodes) == answers
        assert (await served.say(user("still there?"))).choices[0].message.content == "hello"
        for leaf in served.session.tree.leaves()[-20:]:
            check_record(leaf)

    run(talk, SpeakingEngine(speaker("hello")), Limits(2000, 2000))


@pytest.mark.parametrize("path", PATHS)
def test_a_key_opens_its_own_session_in_every_dialect(path: str) -> None:
    async def talk(served: Served) -> None:
        neighbour = LiveSession(served.session._policy, PARAMS, bare=False)
        address = served.server.open(neighbour)
        for headers in ({"x-api-key": address.api_key}, {"Authorization": f"Bearer {address.api_key}"}, {}):
            async with aiohttp.ClientSession(headers=headers) as http:
                url = f"{served.address.base_url}/{path}"
                async with http.post(url, json=good_body(path)) as response:
                    assert response.status == 401
                    body = await response.json()
                    assert is_refusal(path, body)
                    assert body["error"]["type"] == "authentication_error"
        assert not served.session.tree.nodes
        assert not neighbour.tree.nodes

    run(talk, SpeakingEngine(speaker("hello")))


@pytest.mark.parametrize("name", ["chat", "messages", "responses"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("no call", "no message before it has"),
        ("image", "can be given to the policy"),
        ("model", "does not exist"),
        ("top_k", "another distribution"),
    ],
)
def test_what_the_policy_cannot_be_given_is_refused_alike(name: str, change: str, words: str) -> None:
    def body() -> dict[str, Any]:
        client = CLIENTS[name]
        made: dict[str, Any] = client.body(client.__new__(client), deepcopy(HISTORY), [TOOL])
        messages = made["input" if name == "responses" else "messages"]
        match change:
            case "no call":
                del messages[1 if name == "messages" else 2 : -1]
            case "image":
                kind = {"chat": "image_url", "messages": "image", "responses": "input_image"}[name]
                messages.insert(0, user([{"type": kind}]))  # type: ignore[arg-type]
            case "model":
                made["model"] = "gpt-5"
            case _:
                made["presence_penalty"] = 1.0
        return {"model": "policy"} | made

    async def talk(served: Served) -> None:
        client = CLIENTS[name](served.address.base_url, served.address.api_key)
        try:
            with pytest.raises(Refused, match=words) as caught:
                await client.post(client.path, body())
            assert caught.value.status == (404 if change == "model" else 400)
            assert is_refusal(client.path, caught.value.body)
        finally:
            await client.close()
        assert served.session.counts == {"refused": 1}

    run(talk, SpeakingEngine(speaker("hello")))


@pytest.mark.parametrize("path", PATHS)
def test_the_policy_has_the_names_that_the_run_gives_it_and_no_others(path: str) -> None:
    async def talk(served: Served) -> None:
        named = LiveSession(replace(served.session._policy, model_names=("policy", "gpt-5.5")), PARAMS, bare=False)
        addresses = {"named": served.server.open(named), "not named": served.address}
        statuses = {}
        for session, address in addresses.items():
            async with aiohttp.ClientSession(headers={"x-api-key": address.api_key}) as http:
                for name in ("policy", "gpt-5.5", "gpt-5", ["policy"]):
                    async with http.post(f"{address.base_url}/{path}", json=good_body(path) | {"model": name}) as got:
                        statuses[session, str(name)] = got.status
                        body = await got.json()
                        assert got.status == 200 or "agent.model_names" in body["error"]["message"]
                        assert body.get("model", "policy") == "policy"
        assert [statuses["named", name] for name in ("policy", "gpt-5.5", "gpt-5", "['policy']")] == [
            200,
            200,
            404,
            404,
        ]
        assert statuses["not named", "gpt-5.5"] == 404

    run(talk, SpeakingEngine(speaker("hello")))


@pytest.mark.parametrize(
    ("path", "change"),
    [
        ("messages", {"tool_choice": {"type": "any"}}),
        ("messages", {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
        ("messages", {"messages": [user("?"), {"role": "assistant", "content": "I"}]}),
        ("messages", {"messages": [user([{"type": "redacted_thinking", "data": "x"}])]}),  # type: ignore[arg-type]
        ("messages", {"messages": [user([{"type": "hologram"}])]}),  # type: ignore[arg-type]
        ("messages", {"mcp_servers": [{"type": "url"}]}),
        ("messages", {"output_config": {"format": {"type": "json_schema"}}}),
        ("messages", {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}),
        ("responses", {"tools": [{"type": "web_search"}]}),
        ("responses", {"tool_choice": "required"}),
        ("responses", {"text": {"format": {"type": "json_object"}}}),
        ("responses", {"background": True}),
        ("responses", {"truncation": "auto"}),
        ("responses", {"previous_response_id": "resp_99"}),
        ("responses", {"include": ["file_search_call.results"]}),
        ("responses", {"input": [{"type": "item_reference", "id": "x"}]}),
        ("responses", {"input": [{"type": "hologram"}]}),
        ("responses", {"input": [user([{"type": "hologram"}])]}),  # type: ignore[arg-type]
        ("responses", {"input": [{"type": "reasoning", "encrypted_content": "no base64"}]}),
        ("responses", {"conversation": "conv"}),
    ],
)
def test_what_a_dialect_has_and_this_policy_has_not_is_refused(path: str, change: dict[str, Any]) -> None:
    async def talk(served: Served) -> None:
        client = CLIENTS[path](served.address.base_url, served.address.api_key)
        try:
            with pytest.raises(Refused) as caught:
                await client.post(path, good_body(path) | change)
            assert caught.value.status == (404 if "previous_response_id" in change else 400)
            assert is_refusal(path, caught.value.body)
        finally:
            await client.close()

    run(talk, SpeakingEngine(speaker("hello")))


def test_the_name_of_an_answer_of_another_session_is_unknown() -> None:
    async def talk(served: Served) -> None:
        neighbour = LiveSession(served.session._policy, PARAMS, bare=False)
        address = served.server.open(neighbour)
        ours = CLIENTS["responses"](served.address.base_url, served.address.api_key)
        theirs = CLIENTS["responses"](address.base_url, address.api_key)
        try:
            asked = {"model": "policy", "input": "a secret"}
            name = (await theirs.post("responses", asked))["id"]
            unkept = (await ours.post("responses", asked | {"store": False}))["id"]
            for other in (name, unkept):
                with pytest.raises(Refused, match="is stored in this session"):
                    await ours.post("responses", asked | {"previous_response_id": other})
            await theirs.post("responses", asked | {"previous_response_id": name})
        finally:
            await ours.close()
            await theirs.close()

    run(talk, SpeakingEngine(speaker("hello")))


def test_the_page_has_every_parameter() -> None:
    page = (Path(__file__).parents[4] / "docs" / "agents.md").read_text(encoding="utf-8")
    _, _, behind = page.partition("\n**Refused**")
    refused, _, behind = behind.partition("\n**Accepted without effect**")
    accepted, _, _ = behind.partition("\n\n")
    for names, text in ((REFUSED, refused), (IGNORED, accepted), (OF_THE_RUN, page)):
        assert not [name for name in names if f"`{name}`" not in text]


def test_parameters_without_effect_are_accepted_and_named_once(caplog: pytest.LogCaptureFixture) -> None:
    sent: dict[str, Any] = {"reasoning_effort": "high", "verbosity": "low", "metadata": {"a": "b"}, "store": True}
    sent |= {"service_tier": "auto", "thinking": {"type": "enabled", "budget_tokens": 1024}}
    assert sent.keys() <= IGNORED
    assert not IGNORED & (REFUSED.keys() | OF_THE_RUN.keys())

    async def talk(served: Served) -> None:
        client = ChatClient(served.address.base_url, served.address.api_key)
        try:
            for _ in range(3):
                await client.say([user("?")], **sent)
        finally:
            await client.close()
        assert len({node.context.text for node in served.session.tree.nodes}) == 1
        assert not served.session.counts["refused"]

    run(talk, SpeakingEngine(speaker("hello")))
    named = [record.args[0] for record in caplog.records if "has no effect here" in record.msg and record.args]  # type: ignore[index]
    assert sorted(named) == sorted(sent)  # type: ignore[type-var]


@pytest.mark.parametrize("name", CLIENTS)
def test_a_client_that_hangs_up_in_a_stream_loses_nothing(name: str) -> None:
    """The answer was sampled: it stays in the tree, and a client that asks again goes on."""
    engine = SpeakingEngine(speaker("hello " * 30))

    async def talk(served: Served) -> None:
        client = CLIENTS[name](served.address.base_url, served.address.api_key, streams=True)
        address = urlsplit(served.address.base_url)
        try:
            body = json.dumps({"model": "policy", "stream": True, **client.body([user("?")], [])}).encode()
            reader, writer = await asyncio.open_connection(address.hostname, address.port)
            head = f"POST {address.path}/{client.path} HTTP/1.1\r\nHost: x\r\nx-api-key: {served.address.api_key}\r\n"
            writer.write(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            await reader.readuntil(b"data:")
            writer.transport.abort()
            assert (await client.say([user("?")]))["content"].startswith("hello")
        finally:
            await client.close()
        assert len(served.session.tree.nodes) == 2
        assert not served.session.failure.done()
        for leaf in served.session.tree.leaves():
            check_record(leaf)

    run(talk, engine)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("sent", [b'5\r\n{"a"', b"zz\r\n{}\r\n0\r\n\r\n", b"2\r\n{}XX\r\n"])
def test_a_request_whose_body_breaks_off_leaves_nothing(path: str, sent: bytes) -> None:
    async def talk(served: Served) -> None:
        address = urlsplit(served.address.base_url)
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        head = f"POST {address.path}/{path} HTTP/1.1\r\nHost: x\r\nx-api-key: {served.address.api_key}\r\n"
        writer.write(head.encode() + b"Transfer-Encoding: chunked\r\n\r\n" + sent)
        writer.write_eof()
        answer = await asyncio.wait_for(reader.read(), 300)
        writer.close()
        assert not answer or answer.split(b" ")[1] == b"400"
        assert not served.session.tree.nodes
        assert not served.session.failure.done()
        assert (await served.say(user("?"))).choices[0].message.content == "hello"

    run(talk, SpeakingEngine(speaker("hello")))
