"""Samples that are asked for before the weights are there: kept by paused servers, or asked for again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from moe_trm.errors import EngineLost, SyncError
from moe_trm.rollout.servers.http import EngineHttp
from moe_trm.rollout.servers.remote import MEMORY_TAGS, RemoteServer
from tests.unit.rollout.fake_servers import FakeServer, both_serve, in_loop, running
from tests.unit.rollout.local_app import body_from

pytestmark = pytest.mark.usefixtures("in_a_hurry")


@asynccontextmanager
async def loading(
    fleet: Any, fakes: list[FakeServer], newest: dict[str, int]
) -> AsyncIterator[asyncio.Queue[Exception | None]]:
    """Loads that pause the server and wait for an outcome; a fake answers nothing while it is paused.

    Raises what is put into the queue, once for each load; None ends it well.
    """
    load, outcomes = fleet._load, asyncio.Queue[Exception | None]()

    async def paused(server: RemoteServer) -> None:
        fake = next(fake for fake in fakes if fake.url == server.http.url)
        fake.free.clear()
        try:
            with fleet.keeping(server):
                if (failure := await outcomes.get()) is not None:
                    raise failure
                fake.label = str(newest["version"])
        finally:
            fake.free.set()
        await load(server)

    fleet._load = paused
    yield outcomes
    fleet._load = load


async def asked_while_paused(fleet: Any, fakes: list[FakeServer], version: int, count: int) -> Any:
    """A push of `version` and `count` asks, once the paused servers have them."""
    fleet.expect(version)
    asks = [asyncio.ensure_future(body_from(fleet)) for _ in range(count)]
    await asyncio.sleep(0.05)
    assert sum(fake.asked for fake in fakes) == 0
    push = asyncio.ensure_future(fleet.update(version))
    while sum(fake.asked for fake in fakes) < count:
        await asyncio.sleep(0.01)
    assert not any(ask.done() for ask in asks)
    return push, asks


@in_loop
async def test_expected_samples_are_in_the_paused_servers_before_the_weights_are() -> None:
    async with running(2) as (fleet, fakes, newest), loading(fleet, fakes, newest) as outcomes:
        newest["version"] = 2
        push, asks = await asked_while_paused(fleet, fakes, 2, 6)
        assert [server.in_flight for server in fleet.servers] == [3, 3]
        for _ in fakes:
            outcomes.put_nowait(None)
        await push
        assert sorted(await asyncio.gather(*asks)) == [b"a 2"] * 3 + [b"b 2"] * 3
        assert fleet.metrics()["rollout/reissued"] == fleet.metrics()["rollout/losses"] == 0


@in_loop
async def test_samples_kept_by_a_server_that_is_lost_in_the_push_are_asked_elsewhere() -> None:
    async with running(2) as (fleet, fakes, newest), loading(fleet, fakes, newest) as outcomes:
        newest["version"] = 2
        push, asks = await asked_while_paused(fleet, fakes, 2, 4)
        outcomes.put_nowait(EngineLost("it died while it loaded"))
        outcomes.put_nowait(None)
        await push
        left = {server.http.url for server in fleet.servers if server.fenced}
        well = next(fake for fake in fakes if fake.url not in left)
        assert await asyncio.gather(*asks) == [f"{well.name} 2".encode()] * 4
        assert fleet.metrics()["rollout/reissued"] == 2
        outcomes.put_nowait(None)
        await both_serve(fleet)
        assert [fake.label for fake in fakes] == ["2", "2"]


@in_loop
async def test_samples_kept_by_a_server_with_wrong_weights_are_not_taken_from_it() -> None:
    async with running(1) as (fleet, fakes, newest), loading(fleet, fakes, newest) as outcomes:
        newest["version"] = 2
        push, [ask] = await asked_while_paused(fleet, fakes, 2, 1)
        outcomes.put_nowait(SyncError("checksums differ"))
        with pytest.raises(SyncError, match="checksums differ"):
            await push
        await asyncio.sleep(0.1)
        assert not ask.done()
        ask.cancel()


@pytest.mark.parametrize("why", ["not expected", "the first weights", "in turn", "without memory"])
def test_other_servers_get_no_sample_before_they_have_the_weights(why: str) -> None:
    async def run() -> None:
        async with running(1, rolling=why == "in turn") as (fleet, fakes, newest):
            newest["version"] = 2
            if why != "not expected":
                fleet.expect(2)
            if why == "the first weights":
                fleet.servers[0].version = None
            fleet.servers[0].released = why == "without memory"
            async with loading(fleet, fakes, newest) as outcomes:
                push = asyncio.ensure_future(fleet.update(2))
                ask = asyncio.ensure_future(body_from(fleet))
                await asyncio.sleep(0.1)
                assert fakes[0].asked == 0
                outcomes.put_nowait(None)
                await push
                assert await ask == b"a 2"

    in_loop(run)()


def test_a_lost_server_has_its_memory_again_when_it_comes_back() -> None:
    """It was started anew: there is nothing to take back."""
    asked: list[object] = []

    class Backend:
        async def release_memory(self, http: object, tags: Sequence[str]) -> None:
            asked.append(tuple(tags))

        async def resume_memory(self, http: object, tag: str) -> None:
            asked.append(tag)

    async def go(lost: bool) -> list[object]:
        asked.clear()
        http = EngineHttp("http://127.0.0.1:1", None, timeout_s=1, max_attempts=1)
        server = RemoteServer(http, Backend())  # type: ignore[arg-type]
        await server.release_memory()
        if lost:
            server.fence("connection refused")
        await server.resume_memory()
        assert not server.released
        await server.close()
        return [*asked]

    assert asyncio.run(go(lost=False)) == [MEMORY_TAGS, *MEMORY_TAGS]
    assert asyncio.run(go(lost=True)) == [MEMORY_TAGS]
