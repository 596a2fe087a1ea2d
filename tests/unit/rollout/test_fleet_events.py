"""The fleet in simulated time: servers die, hang, come back and are given weights at any moment.

Every sample is answered once, by weights that were proved and not older than the newest at its request.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, cast
from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st

from moe_trm.errors import EngineLost
from moe_trm.rollout.servers import fleet as fleet_module
from moe_trm.rollout.servers import router as router_module
from moe_trm.rollout.servers.fleet import Fleet
from moe_trm.rollout.servers.http import EngineHttp, EngineSlow, HttpStatusError
from moe_trm.rollout.servers.remote import RemoteServer
from moe_trm.rollout.servers.router import Router
from moe_trm.rollout.sglang.backend import SglangBackend
from tests.unit.rollout.local_app import body_from
from tests.unit.virtual_time import run

SAMPLES, PUSHES, FAULTS = 24, 4, 4
TIMEOUT_S = 60.0


class SimulatedServer:
    """A stand-in for `EngineHttp`. `label`: of the weights it serves; a new life begins with the checkpoint's."""

    def __init__(self, url: str, chance: random.Random) -> None:
        self.url, self._chance = url, chance
        self.label, self.life, self.up = "default", 0, True
        self.going = asyncio.Event()
        self.going.set()
        self._aborted = asyncio.Event()

    async def request(
        self,
        method: str,
        path: str,
        body: Mapping[str, object] | None = None,
        *,
        timeout_s: float | None = None,
        attempts: int | None = None,
    ) -> bytes:
        life = self.life
        try:
            async with asyncio.timeout(timeout_s or TIMEOUT_S):
                await self.going.wait()
                if path == "/abort_request":
                    self._aborted.set()
                    self._aborted = asyncio.Event()
                if path == "/generate":
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self._aborted.wait(), self._chance.uniform(0.1, 20))
                    await self.going.wait()
        except TimeoutError:
            raise EngineSlow("slow", where=self.url) from None
        if not self.up or life != self.life:
            raise EngineLost("gone", where=self.url)
        return self.label.encode() if path == "/generate" else json.dumps({"weight_version": self.label}).encode()

    async def load(self, version: int) -> None:
        await self.request("POST", "/update_weights_from_disk")
        life = self.life
        await asyncio.sleep(self._chance.uniform(0.1, 5))
        await self.going.wait()
        if not self.up or life != self.life:
            raise EngineLost("gone while it was given weights", where=self.url)
        self.label = str(version)

    async def die(self) -> None:
        """Killed, and started again after a while."""
        self.up, self.life, self.label = False, self.life + 1, "default"
        self.going.set()
        await asyncio.sleep(self._chance.uniform(1, 40))
        self.up = True

    async def hang(self) -> None:
        """Stopped, and goes on after a while."""
        self.going.clear()
        await asyncio.sleep(self._chance.uniform(1, 100))
        self.going.set()

    async def close(self) -> None:
        pass


class SimulatedRouter:
    """Stands where `EngineHttp` does: one of the servers on its list answers."""

    url = "http://router"

    def __init__(self, servers: list[SimulatedServer], chance: random.Random) -> None:
        self._servers, self._chance = {server.url: server for server in servers}, chance
        self.listed: dict[str, str] = {}

    async def request(
        self,
        method: str,
        path: str,
        body: Mapping[str, object] | None = None,
        *,
        timeout_s: float | None = None,
        attempts: int | None = None,
    ) -> bytes:
        if path == "/generate":
            if not self.listed:
                raise EngineLost("no worker", where=self.url)
            return await self._servers[self._chance.choice(list(self.listed))].request(method, path, body)
        await asyncio.sleep(self._chance.uniform(0, 0.2))
        if method == "POST":
            assert body is not None
            url = str(body["url"])
            if url in self.listed:
                error = HttpStatusError("known", where=self.url)
                error.status = 409
                raise error
            self.listed[url] = f"id of {url}"
        if method == "DELETE":
            self.listed = {url: name for url, name in self.listed.items() if not path.endswith(name)}
        workers = [{"id": name, "url": url, "is_healthy": True} for url, name in self.listed.items()]
        return json.dumps({"workers": workers}).encode()

    async def close(self) -> None:
        pass


async def live(seed: int, *, num_servers: int, routed: bool, interrupt: bool, rolling: bool) -> None:
    chance = random.Random(seed)
    fakes = [SimulatedServer(f"http://server{number}", chance) for number in range(num_servers)]
    newest = everywhere = 0

    async def load(server: RemoteServer) -> None:
        version = newest
        await cast(SimulatedServer, server.http).load(version)
        server.version = version

    https: list[Any] = [*fakes]
    router = Router(cast(EngineHttp, SimulatedRouter(fakes, chance)), "key") if routed else None
    fleet = Fleet(
        [RemoteServer(http, SglangBackend(), router.endpoint if router else None) for http in https],
        load,
        interrupt=interrupt,
        patience_s=1e6,
        router=router,
        rolling=rolling,
    )
    fleet.start()

    async def sample() -> None:
        await asyncio.sleep(chance.uniform(0, 200))
        # With rolling pushes the version before may answer until every server has the newest.
        oldest = everywhere if rolling else newest
        while (answer := (await body_from(fleet)).decode()) == "default":
            await fleet.fence_restarted()  # as the client does with an answer of weights that no push gave
        assert oldest <= int(answer) <= newest

    async def pushes() -> None:
        nonlocal newest, everywhere
        for _ in range(PUSHES):
            await asyncio.sleep(chance.uniform(0, 50))
            newest += 1
            await fleet.update(newest)
            everywhere = newest

    async def faults() -> None:
        for _ in range(FAULTS):
            await asyncio.sleep(chance.uniform(0, 60))
            fake = chance.choice(fakes)
            if fake.up and fake.going.is_set():
                await (fake.die() if chance.random() < 0.5 else fake.hang())

    newest = 1
    try:
        await fleet.update(1)
        everywhere = 1
        async with asyncio.timeout(1e5):
            await asyncio.gather(pushes(), faults(), *(sample() for _ in range(SAMPLES)))
            await fleet.fence_restarted()
            while fleet.metrics()["rollout/servers"] < num_servers:
                await asyncio.sleep(1)
        assert {server.version for server in fleet.servers} == {newest}
        assert {fake.label for fake in fakes} == {str(newest)}
    finally:
        await fleet.close()


@settings(max_examples=150)
@given(
    seed=st.integers(0, 2**32),
    num_servers=st.integers(1, 3),
    push=st.sampled_from(["routed", "routed, interrupt", "interrupt", "wait", "rolling"]),
)
def test_every_sample_is_answered_by_weights_that_were_proved(seed: int, num_servers: int, push: str) -> None:
    kinds = {kind: kind in push for kind in ("routed", "interrupt", "rolling")}
    # The load of this machine says nothing of the simulated one.
    patches = [patch.object(module, "patient", float) for module in (fleet_module, router_module)]
    # Nor is a server given up here, whatever its hangs are.
    with patches[0], patches[1], patch.object(fleet_module, "LATE_LOADS", 1 << 30):
        run(live(seed, num_servers=num_servers, **kinds))
