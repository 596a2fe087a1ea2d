"""Hostile requests to a real rollout server: no action without the key, nonsense refused, service continues."""

from __future__ import annotations

import asyncio
import io
import json
import random
from collections.abc import Awaitable, Callable

import aiohttp
import pytest

from moe_trm.rollout.servers.process import Server

ACTIONS = (
    "/generate",
    "/update_weights_from_disk",
    "/update_weight_version",
    "/init_weights_update_group",
    "/weights_checker",
    "/flush_cache",
    "/pause_generation",
    "/abort_request",
)
GOOD = {"input_ids": [1, 5, 6], "sampling_params": {"temperature": 1.0, "max_new_tokens": 2}}
ROUNDS, AT_ONCE = 1000, 16


def ask(server: Server, work: Callable[[aiohttp.ClientSession], Awaitable[None]], *, key: str | None) -> None:
    """Do `work`; afterwards the server must answer an ordinary request."""

    async def go() -> None:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        async with aiohttp.ClientSession(server.url, headers=headers) as session:
            await work(session)
        async with (
            aiohttp.ClientSession(server.url, headers={"Authorization": f"Bearer {server.api_key}"}) as session,
            session.post("/generate", json=GOOD) as answer,
        ):
            assert answer.status == 200
            assert len((await answer.json())["output_ids"]) <= 2

    asyncio.run(go())


@pytest.mark.parametrize("key", [None, "", "wrong", "integration-ke", "integration-key2"])
def test_without_the_key_nothing_is_done(rollout_server: Server, key: str | None) -> None:
    async def work(session: aiohttp.ClientSession) -> None:
        for path in ACTIONS:
            async with session.post(path, json=GOOD) as answer:
                assert answer.status == 401, path

    ask(rollout_server, work, key=key)


def nonsense(rng: random.Random) -> bytes:
    good = json.dumps(GOOD).encode()
    kind = rng.randrange(4)
    if kind == 0:
        return rng.randbytes(rng.randrange(400))
    if kind == 1:
        return good[: rng.randrange(len(good))]
    if kind == 2:
        return b"[" * rng.randrange(1, 50_000)
    odd: list[object] = [-1, 1e400, "x", {}, {"a": 1}, ["x"], [None], [{}]]
    return json.dumps({"input_ids": rng.choice(odd), "sampling_params": rng.choice(odd)}).encode()


def test_a_thousand_malformed_bodies_are_refused(rollout_server: Server) -> None:
    rng = random.Random(0)

    async def post(session: aiohttp.ClientSession, body: bytes) -> int:
        async with session.post("/generate", data=body, headers={"Content-Type": "application/json"}) as answer:
            return answer.status

    async def work(session: aiohttp.ClientSession) -> None:
        for _ in range(0, ROUNDS, AT_ONCE):
            statuses = await asyncio.gather(*(post(session, nonsense(rng)) for _ in range(AT_ONCE)))
            assert min(statuses) >= 400

    ask(rollout_server, work, key=rollout_server.api_key)


def test_oversized_bodies_are_refused(rollout_server: Server) -> None:
    async def without_key(session: aiohttp.ClientSession) -> None:
        async with session.post("/generate", data=io.BytesIO(b"\0" * (64 << 20))) as answer:
            assert answer.status == 401

    async def prompt_beyond_the_context(session: aiohttp.ClientSession) -> None:
        async with session.post("/generate", json={**GOOD, "input_ids": [5] * 300_000}) as answer:
            assert answer.status == 400

    ask(rollout_server, without_key, key=None)
    ask(rollout_server, prompt_beyond_the_context, key=rollout_server.api_key)
