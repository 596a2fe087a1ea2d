"""A stand-in of a server, listening on this machine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from aiohttp import web

from launch.job import free_port
from moe_trm.rollout.servers.fleet import Fleet


class LocalApp:
    """An app that answers with `routes`. After `start` it has a `port` and a `url`."""

    def routes(self) -> Sequence[web.RouteDef]:
        raise NotImplementedError

    async def start(self, port: int = 0) -> None:
        app = web.Application()
        app.router.add_routes(self.routes())
        self.runner = web.AppRunner(app, shutdown_timeout=0.01)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", port or free_port())
        await site.start()
        assert site._server is not None
        self.port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
        self.url = f"http://127.0.0.1:{self.port}"

    async def stop(self) -> None:
        await self.runner.cleanup()


@asynccontextmanager
async def listening(*routes: web.RouteDef, port: int = 0) -> AsyncIterator[str]:
    """The address of an app that answers with `routes` inside."""
    app = LocalApp()
    app.routes = lambda: routes  # type: ignore[method-assign]
    await app.start(port)
    try:
        yield app.url
    finally:
        await app.stop()


async def body_from(fleet: Fleet) -> bytes:
    """The body of one answer."""
    body, _ = await fleet.ask({})
    return body
