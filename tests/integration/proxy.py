"""A proxy in front of a real server, which counts what passes and can be shut for some requests or for all."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
from aiohttp import web


class Proxy:
    """A proxy in front of a server.

    Attributes:
        shut: paths that are answered with 502 (`*`: all).
        passed: answered requests by path.
        refused: number of refused requests.
    """

    def __init__(self, server_url: str) -> None:
        self._server_url, self.shut = server_url, set[str]()
        self.passed, self.refused = Counter[str](), 0

    async def _pass_on(self, request: web.Request) -> web.Response:
        if {"*", request.path} & self.shut:
            self.refused += 1
            return web.Response(status=502)
        async with (
            aiohttp.ClientSession() as session,
            session.request(
                request.method, self._server_url + request.path_qs, headers=request.headers, data=await request.read()
            ) as answer,
        ):
            body = await answer.read()
            self.passed[request.path] += 1
            return web.Response(status=answer.status, body=body, content_type=answer.content_type)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[str]:
        """Its address, inside the `with`."""
        app = web.Application(client_max_size=2**28)
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        assert site._server is not None
        try:
            yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[attr-defined]
        finally:
            await runner.cleanup()
