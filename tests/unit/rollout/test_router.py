"""Servers behind a router: it is told who may sample, obeys with a delay, forgets, and may be gone for a while."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count

import aiohttp
import pytest
from aiohttp import web

from moe_trm.errors import EngineError, EngineLost
from moe_trm.rollout.servers import router as router_module
from moe_trm.rollout.servers.fleet import Fleet
from moe_trm.rollout.servers.http import EngineHttp
from moe_trm.rollout.servers.remote import RemoteServer
from moe_trm.rollout.servers.router import Router
from moe_trm.rollout.sglang.backend import SglangBackend
from tests.unit.rollout.fake_servers import FakeServer, in_loop
from tests.unit.rollout.local_app import LocalApp, body_from

KEY = "key"


class FakeRouter(LocalApp):
    """A router that takes turns. It refuses whoever has no key.

    Orders are carried out a moment later, and a server that is removed is drained first.
    """

    def __init__(self, obeys: bool = True) -> None:
        self.workers: dict[str, dict[str, object]] = {}
        self.obeys, self._turn, self._ids = obeys, count(), count()
        self.free = asyncio.Event()
        self.free.set()
        self.orders: list[str] = []

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/generate", self._generate),
            web.get("/workers", self._list),
            web.post("/workers", self._add),
            web.delete("/workers/{id}", self._remove),
        ]

    async def _generate(self, request: web.Request) -> web.Response:
        await self.free.wait()
        able = [url for url, worker in self.workers.items() if worker["status"] == "ready"]
        if not able:
            return web.Response(status=503)
        url = able[next(self._turn) % len(able)]
        try:
            async with aiohttp.ClientSession() as session, session.post(f"{url}/generate", json={}) as answer:
                return web.Response(status=answer.status, body=await answer.read())
        except aiohttp.ClientError:
            return web.Response(status=502)

    async def _list(self, request: web.Request) -> web.Response:
        await self.free.wait()
        return web.json_response({"workers": [*self.workers.values()]})

    async def _add(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.orders.append(f"add {body['url']} {body['api_key']}")
        if body["url"] in self.workers:
            return web.Response(status=409)
        worker = {"id": str(next(self._ids)), "url": body["url"], "is_healthy": False, "status": "pending"}
        asyncio.get_running_loop().call_later(0.02, self._begin, worker)
        return web.Response(status=202)

    def _begin(self, worker: dict[str, object]) -> None:
        if self.obeys:
            self.workers[str(worker["url"])] = worker | {"is_healthy": True, "status": "ready"}

    async def _remove(self, request: web.Request) -> web.Response:
        url = next(url for url, worker in self.workers.items() if worker["id"] == request.match_info["id"])
        self.orders.append(f"remove {url}")
        self.workers[url] |= {"is_healthy": False, "status": "draining"}
        asyncio.get_running_loop().call_later(0.1, self.workers.pop, url)
        return web.Response(status=202)

    @property
    def ready(self) -> set[str]:
        return {url for url, worker in self.workers.items() if worker["status"] == "ready"}


@pytest.fixture(autouse=True)
def router_in_a_hurry(in_a_hurry: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_module, "POLL_S", 0.01)
    monkeypatch.setattr(router_module, "ORDER_S", 0.3)
    monkeypatch.setattr(router_module, "ANSWER_S", 0.2)


class Behind:
    """A fleet of fakes behind a fake router."""

    def __init__(self, *, patience_s: float, interrupt: bool) -> None:
        self.fakes, self.router, self.newest = [FakeServer(name) for name in "ab"], FakeRouter(), 1
        self.patience_s, self.interrupt = patience_s, interrupt

    async def start(self) -> None:
        for fake in (*self.fakes, self.router):
            await fake.start()
        router = Router(EngineHttp(self.router.url, KEY, timeout_s=60.0, max_attempts=1), KEY)
        connections = [EngineHttp(fake.url, KEY, timeout_s=60.0, max_attempts=1) for fake in self.fakes]
        self.fleet = Fleet(
            [RemoteServer(http, SglangBackend(), router.endpoint) for http in connections],
            self._load,
            interrupt=self.interrupt,
            patience_s=self.patience_s,
            router=router,
        )
        self.fleet.start()

    async def _load(self, server: RemoteServer) -> None:
        if not await server.alive(60.0):
            raise EngineLost("no answer to a load", where=server.http.url)
        next(fake for fake in self.fakes if fake.url == server.http.url).label = str(self.newest)
        server.version = self.newest

    async def push(self) -> None:
        self.newest += 1
        await self.fleet.update(self.newest)

    async def close(self) -> None:
        await self.fleet.close()
        for fake in (*self.fakes, self.router):
            await fake.stop()


@asynccontextmanager
async def behind_a_router(*, patience_s: float = 60.0, interrupt: bool = False) -> AsyncIterator[Behind]:
    behind = Behind(patience_s=patience_s, interrupt=interrupt)
    await behind.start()
    try:
        await behind.push()
        yield behind
    finally:
        await behind.close()


@in_loop
async def test_behind_a_router_no_server_is_named() -> None:
    async with behind_a_router() as behind:
        _, place = await behind.fleet.ask({})
        assert place is None


async def answers(behind: Behind, number: int) -> set[bytes]:
    return set(await asyncio.gather(*(body_from(behind.fleet) for _ in range(number))))


@in_loop
async def test_the_router_is_given_the_servers_with_their_key_and_both_sample() -> None:
    async with behind_a_router() as behind:
        assert behind.router.ready <= {fake.url for fake in behind.fakes}
        while len(behind.router.ready) < 2:
            await asyncio.sleep(0.01)
        assert await answers(behind, 6) == {b"a 2", b"b 2"}
        assert sorted(set(behind.router.orders)) == sorted(f"add {fake.url} {KEY}" for fake in behind.fakes)


@in_loop
async def test_a_server_that_nobody_named_is_taken_off_before_the_first_sample() -> None:
    async with behind_a_router() as behind:
        behind.router._begin({"id": "x", "url": "http://127.0.0.1:9"})
        await asyncio.sleep(0.1)  # the fleet looks again every WATCH_S
        assert await answers(behind, 8) <= {b"a 2", b"b 2"}
        assert "remove http://127.0.0.1:9" in behind.router.orders


@in_loop
async def test_a_server_that_hangs_while_another_answers_is_noticed_and_what_it_had_is_asked_again() -> None:
    async with behind_a_router() as behind:
        while len(behind.router.ready) < 2:
            await asyncio.sleep(0.01)
        behind.fakes[1].free.clear()
        assert await answers(behind, 8) == {b"a 2"}
        assert behind.fleet.metrics()["rollout/reissued"] > 0
        behind.fakes[1].free.set()


@in_loop
async def test_nothing_is_asked_while_any_server_is_given_weights() -> None:
    async with behind_a_router() as behind:
        behind.fakes[1].free.clear()  # its load takes until it is given up
        push = asyncio.ensure_future(behind.push())
        await asyncio.sleep(0.05)
        before = sum(fake.asked for fake in behind.fakes)
        ask = asyncio.ensure_future(body_from(behind.fleet))
        await asyncio.sleep(0.05)
        assert not push.done()
        assert sum(fake.asked for fake in behind.fakes) == before
        await push
        assert await ask == b"a 3"
        behind.fakes[1].free.set()


@pytest.mark.parametrize("interrupt", [False, True])
def test_a_push_waits_for_what_runs_on_any_server_or_ends_it(interrupt: bool) -> None:
    @in_loop
    async def go() -> None:
        async with behind_a_router(interrupt=interrupt) as behind:
            while len(behind.router.ready) < 2:
                await asyncio.sleep(0.01)
            for fake in behind.fakes:
                fake.slow = True
            asks = [asyncio.ensure_future(body_from(behind.fleet)) for _ in range(4)]
            await asyncio.sleep(0.05)
            push = asyncio.ensure_future(behind.push())
            await asyncio.sleep(0.15)
            assert all(ask.done() for ask in asks) is interrupt
            for fake in behind.fakes:
                fake.aborted.set()
            await push
            assert set(await asyncio.gather(*asks)) == {b"a 2", b"b 2"}

    go()


@in_loop
async def test_a_router_that_was_started_again_is_told_again() -> None:
    async with behind_a_router() as behind:
        await behind.router.stop()
        ask = asyncio.ensure_future(body_from(behind.fleet))
        await asyncio.sleep(0.2)
        assert not ask.done()
        behind.router.workers.clear()
        await behind.router.start(behind.router.port)
        assert await ask in (b"a 2", b"b 2")


@in_loop
async def test_what_a_router_that_hangs_holds_is_asked_for_again() -> None:
    async with behind_a_router() as behind:
        behind.router.free.clear()
        ask = asyncio.ensure_future(body_from(behind.fleet))
        while behind.fleet.metrics()["rollout/reissued"] == 0:
            await asyncio.sleep(0.02)
        assert not ask.done()
        behind.router.free.set()
        assert await ask in (b"a 2", b"b 2")
        assert behind.fleet.metrics()["rollout/servers"] == 2


@in_loop
async def test_the_run_is_given_up_when_the_router_does_not_come_back() -> None:
    async with behind_a_router(patience_s=0.2) as behind:
        await behind.router.stop()
        with pytest.raises(EngineError, match="router is not there"):
            await body_from(behind.fleet)


@in_loop
async def test_a_router_that_does_not_obey_ends_the_run_with_what_it_does_instead() -> None:
    async with behind_a_router(patience_s=0.2) as behind:
        behind.router.obeys = False
        behind.router.workers.clear()
        with pytest.raises(EngineError, match="does not choose among"):
            await body_from(behind.fleet)
