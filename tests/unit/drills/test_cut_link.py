"""The link that a chaos run cuts: what is in flight is reset, and what comes after it passes."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest
from aiohttp import web

from tests.drills.cut_link import link_to
from tests.unit.rollout.local_app import LocalApp


class Held(LocalApp):
    """Answers `/slow` once it is `free`, and everything else at once."""

    def __init__(self) -> None:
        self.begun, self.free = asyncio.Event(), asyncio.Event()

    def routes(self) -> list[web.RouteDef]:
        return [web.post("/slow", self._slow), web.get("/fast", self._fast)]

    async def _slow(self, request: web.Request) -> web.Response:
        self.begun.set()
        await self.free.wait()
        return web.Response(text="late")

    async def _fast(self, request: web.Request) -> web.Response:
        return web.Response(text="x" * 300_000)


def test_what_is_in_flight_is_reset_and_what_comes_after_passes() -> None:
    async def run() -> None:
        app = Held()
        await app.start()
        try:
            with link_to(app.url) as link:
                async with aiohttp.ClientSession() as session:
                    asking = asyncio.ensure_future(session.post(f"{link.url}/slow"))
                    await asyncio.wait_for(app.begun.wait(), 300)
                    assert link.cut() == 1
                    with pytest.raises(aiohttp.ClientError):
                        await asking
                    async with session.get(f"{link.url}/fast") as answer:
                        assert len(await answer.text()) == 300_000
        finally:
            app.free.set()
            await app.stop()

    asyncio.run(run())
