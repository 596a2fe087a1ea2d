"""Servers that answer, hang and fail as a test wants, and a fleet over them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from moe_trm.errors import EngineLost
from moe_trm.rollout.servers.fleet import Fleet
from moe_trm.rollout.servers.http import EngineHttp
from moe_trm.rollout.servers.remote import RemoteServer
from moe_trm.rollout.servers.use_proof import ServerUnfit
from moe_trm.rollout.sglang.backend import SglangBackend
from tests.unit.rollout.local_app import LocalApp


class FakeServer(LocalApp):
    """Answers like SGLang as far as a fleet asks. `hangs`: nothing is answered; `fails`: every sample gets `status`."""

    def __init__(self, name: str) -> None:
        self.name, self.label, self.asked, self.aborted = name, "default", 0, asyncio.Event()
        self.fails, self.slow, self.status, self.says = False, False, 500, ""
        self.free = asyncio.Event()
        self.free.set()

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/generate", self._generate),
            web.post("/abort_request", self._abort),
            web.get("/health", self._health),
            web.get("/model_info", self._info),
        ]

    async def _generate(self, request: web.Request) -> web.Response:
        self.asked += 1
        await self.free.wait()
        if self.fails:
            return web.Response(status=self.status, text=self.says)
        if self.slow:
            self.aborted.clear()
            await self.aborted.wait()
        return web.Response(text=f"{self.name} {self.label}")

    async def _abort(self, request: web.Request) -> web.Response:
        self.aborted.set()
        return web.Response()

    async def _health(self, request: web.Request) -> web.Response:
        await self.free.wait()
        return web.Response()

    async def _info(self, request: web.Request) -> web.Response:
        await self.free.wait()
        return web.json_response({"weight_version": self.label})


@asynccontextmanager
async def running(
    count: int, *, interrupt: bool = False, patience_s: float = 60.0, timeout_s: float = 60.0, rolling: bool = False
) -> AsyncIterator[Any]:
    """`count` fake servers and a fleet over them; a load changes a server's label to the version in `newest`."""
    fakes = [FakeServer(name) for name in "abc"[:count]]
    for fake in fakes:
        await fake.start()
    newest: dict[str, Any] = {"version": 1}

    async def load(server: RemoteServer) -> None:
        if newest.get(server.http.url) == "unfit":
            raise ServerUnfit("other weights", where=server.http.url, got="stale")
        if not await server.alive(60.0):
            raise EngineLost("no answer to a load", where=server.http.url)
        next(fake for fake in fakes if fake.url == server.http.url).label = str(newest["version"])
        server.version = newest["version"]

    connections = [EngineHttp(fake.url, None, timeout_s=timeout_s, max_attempts=1) for fake in fakes]
    fleet = Fleet(
        [RemoteServer(http, SglangBackend()) for http in connections],
        load,
        interrupt=interrupt,
        patience_s=patience_s,
        rolling=rolling,
    )
    fleet.start()
    try:
        await fleet.update(1)
        yield fleet, fakes, newest
    finally:
        await fleet.close()
        for fake in fakes:
            await fake.stop()


async def both_serve(fleet: Fleet) -> None:
    while fleet.metrics()["rollout/servers"] < 2:
        await asyncio.sleep(0.02)


def in_loop(work: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def ran() -> None:
        asyncio.run(asyncio.wait_for(work(), 300))

    return ran
