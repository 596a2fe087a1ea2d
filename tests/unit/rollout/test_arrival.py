"""A server that somebody else started is waited for as long as it may load; what it refuses, it refuses at once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import pytest
from aiohttp import web

from launch.job import free_port
from moe_trm.errors import EngineLost
from moe_trm.rollout import teacher
from moe_trm.rollout.servers import arrival as arrival_module
from moe_trm.rollout.servers import remote
from moe_trm.rollout.servers.arrival import Arrival
from moe_trm.rollout.servers.http import EngineHttp, HttpStatusError
from moe_trm.rollout.servers.remote import RemoteServer
from moe_trm.rollout.servers.router import Router
from moe_trm.rollout.sglang.backend import SglangBackend
from moe_trm.rollout.teacher import TaughtSampler
from moe_trm.types import Prompt, ServerState
from tests.unit.rollout.local_app import LocalApp
from tests.unit.rollout.test_router import FakeRouter
from tests.unit.rollout.test_teacher import Sampling, Teacher

PATIENCE_S = 600.0


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrival_module, "POLL_S", 0.02)
    for module in (remote, teacher):
        monkeypatch.setattr(module, "ANSWER_S", 0.5)


class Slow(LocalApp):
    """Answers each question by the next status of `answers`; 0: not at all."""

    def __init__(self, *answers: int) -> None:
        self.answers = [*answers]

    def routes(self) -> Sequence[web.RouteDef]:
        return [web.get("/health", self.health)]

    async def health(self, request: web.Request) -> web.Response:
        if not (status := self.answers.pop(0)):
            await asyncio.sleep(PATIENCE_S)
        return web.Response(status=status)


def http_of(url: str) -> EngineHttp:
    return EngineHttp(url, "key", timeout_s=0.5, max_attempts=1)


async def until_awaited(server: RemoteServer) -> ServerState:
    while server.state.awaited_s is None:
        await asyncio.sleep(0.01)
    return server.state


def test_it_waits_until_there_is_a_server_and_until_that_has_loaded(caplog: pytest.LogCaptureFixture) -> None:
    """It takes no connection, a proxy says that it is away, it loads, it is silent, and has too much to do."""
    app, port = Slow(502, 503, 503, 0, 429, 200), free_port()

    async def go() -> None:
        server = RemoteServer(http_of(f"http://127.0.0.1:{port}"), SglangBackend())
        assert server.state.awaited_s is None
        starting = asyncio.ensure_future(server.started(PATIENCE_S))
        state = await until_awaited(server)
        assert (state.lost_s, state.limit_s) == (None, PATIENCE_S)
        await app.start(port)
        await starting
        assert server.state == ServerState(server.http.url)
        await server.close()
        await app.stop()

    with caplog.at_level(logging.WARNING):
        asyncio.run(go())
    assert not app.answers
    assert f"waiting for http://127.0.0.1:{port}: 0 s of at most 600 s" in caplog.text


def test_a_name_that_is_not_known_yet_is_waited_for() -> None:
    async def go() -> None:
        server = RemoteServer(http_of("http://no-such-host.invalid:1"), SglangBackend())
        starting = asyncio.ensure_future(server.started(PATIENCE_S))
        await until_awaited(server)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        await server.close()

    asyncio.run(go())


@pytest.mark.parametrize("status", [401, 403, 404])
def test_what_it_refuses_is_refused_at_once(status: int) -> None:
    async def go() -> None:
        app = Slow(503, status)
        await app.start()
        server = RemoteServer(http_of(app.url), SglangBackend())
        with pytest.raises(HttpStatusError) as refused:
            await server.started(PATIENCE_S)
        assert refused.value.status == status
        await server.close()
        await app.stop()

    asyncio.run(go())


def test_the_wait_ends_with_what_it_met_last_and_names_the_setting() -> None:
    async def ask() -> None:
        raise EngineLost("the server is away", where="http://one", got="refused", fix="Start it.")

    with pytest.raises(EngineLost, match="away") as told:
        asyncio.run(Arrival("http://one", 0.05).of(ask))
    assert "refused, for 0.05 s" in str(told.value)
    assert told.value.fix.startswith("Start it. Raise rollout.server.startup_timeout_s")


def test_a_router_and_a_teacher_are_waited_for_too() -> None:
    router, teacher, ports = FakeRouter(), Teacher(), (free_port(), free_port())

    async def go() -> None:
        asked = Router(http_of(f"http://127.0.0.1:{ports[0]}"), "key")
        scores = EngineHttp(f"http://127.0.0.1:{ports[1]}", "key", timeout_s=30.0, max_attempts=1)
        taught = TaughtSampler(Sampling(), [scores], SglangBackend(), PATIENCE_S)
        waits = [
            asyncio.ensure_future(asked.started(PATIENCE_S)),
            *(asyncio.ensure_future(taught.sample(Prompt("p", (1,)), sample_id=i, group_id=0)) for i in range(2)),
        ]
        _, waiting = await asyncio.wait(waits, timeout=0.3)
        assert len(waiting) == 3
        await router.start(ports[0])
        await teacher.start(ports[1])
        await asyncio.gather(*waits)
        await asked.endpoint.close()
        await taught.close()
        await router.stop()
        await teacher.stop()

    asyncio.run(go())
