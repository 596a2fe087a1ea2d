"""Two runs that are given one server: the second is refused, and where it cannot be, neither trains on the other's
samples.

The servers are real processes of the scripted engine; the parser of SGLang's labels is held by `test_parse.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from moe_trm.errors import EngineError, SyncError
from moe_trm.rollout.server_engine import ServerEngine
from moe_trm.rollout.servers import ownership
from moe_trm.rollout.servers.backend import Served
from moe_trm.rollout.servers.ownership import Lease, _name
from moe_trm.rollout.servers.process import Server, start_server
from tests.unit.rollout.test_scripted_servers import KEY, config, push, sampled

Work = Callable[[ServerEngine, ServerEngine], Awaitable[None]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("script")
    running = start_server(Served.of(config(folder)), folder / "rollout.log", KEY)
    yield running
    running.stop()


def with_two(folder: Path, server: Server, work: Work) -> None:
    async def run() -> None:
        engines = [ServerEngine(config(folder, url=server.url), KEY) for _ in range(2)]
        try:
            await work(*engines)
        finally:
            for engine in engines:
                await engine.close()

    asyncio.run(run())


def test_the_second_run_is_refused_until_the_first_has_ended(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ownership, "LEASE_WAIT_S", 0.0)

    async def work(first: ServerEngine, second: ServerEngine) -> None:
        await first.start()
        with pytest.raises(EngineError, match="another run samples from this rollout server") as caught:
            await second.start()
        assert "process " in str(caught.value.got)
        await first.close()
        await second.start()

    with_two(tmp_path, server, work)


def test_samples_of_another_run_are_never_read_under_the_same_number(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As from two machines, where no lease reaches. The server has the weights of the run that pushed last."""

    async def nothing(*_: object) -> None:
        return None

    monkeypatch.setattr(Lease, "take", nothing)

    async def work(first: ServerEngine, second: ServerEngine) -> None:
        weights = push(tmp_path, 3)
        await first.start()
        await first.load_weights(weights)
        assert len(await sampled(first, 2)) == 2
        await second.start()
        await second.load_weights(weights)
        assert {record.versions[0] for record in await sampled(second, 2)} == {3}
        with pytest.raises(SyncError, match="another run gives this rollout server its weights"):
            await sampled(first, 1)
        assert len(await sampled(second, 2)) == 2

    with_two(tmp_path, server, work)


def test_nobody_without_the_key_can_foretell_the_name_of_a_lease() -> None:
    """Who could, would keep runs from their server."""
    here, there = "http://127.0.0.1:30000", "http://127.0.0.1:30001"
    assert len({_name(here, "key"), _name(here, "another"), _name(here, ""), _name(there, "key")}) == 4
    assert _name("http://localhost:30000/", "key") == _name(here, "key")
