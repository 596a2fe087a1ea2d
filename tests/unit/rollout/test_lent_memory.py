"""Lent memory by the rules of the engine: a stand-in of SGLang dies where SGLang dies (`tests/standins/lender`)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from http.client import RemoteDisconnected
from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest
import torch

from moe_trm.config.schema import Config
from moe_trm.errors import EngineError
from moe_trm.rollout.server_engine import ServerEngine
from moe_trm.rollout.servers import fleet as fleet_module
from moe_trm.rollout.servers import loan as loan_module
from moe_trm.rollout.servers import watchdog as watchdog_module
from moe_trm.rollout.servers.backend import Served
from moe_trm.rollout.servers.loan import Loan
from moe_trm.rollout.servers.process import Server, start_server
from moe_trm.rollout.servers.remote import RemoteServer
from moe_trm.rollout.servers.watchdog import Watchdog
from moe_trm.step.push import BroadcastPusher, DiskPusher
from moe_trm.sync.manifest import WeightPush
from moe_trm.sync.rounding import Rounding
from tests.unit.rollout.test_server_process import config
from tests.unit.rollout.test_sglang_engine import HF
from tests.unit.rollout.test_watchdog import until

KEY = "key"
LENDER = Path(__file__).parents[2] / "standins" / "lender"
LOOKS_S = 0.5
"""Several looks of the watchdog and of the fleet."""


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The requests that the stand-in got; it starts in place of SGLang, and everybody looks at it all the time."""
    for module, name, seconds in (
        (watchdog_module, "POLL_S", 0.02), (watchdog_module, "LOOK_S", 0.05), (fleet_module, "WATCH_S", 0.05),
        (fleet_module, "FIRST_PAUSE_S", 0.05), (fleet_module, "SILENCE_S", 0.05),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, seconds)
    monkeypatch.setenv("PYTHONPATH", str(LENDER))
    monkeypatch.setenv("LENDER_LOG", str(tmp_path / "requests"))
    (tmp_path / "config.json").write_text(json.dumps(HF | {"mlp_only_layers": []}))
    return tmp_path / "requests"


def colocated(tmp_path: Path, *arguments: str, url: str | None = None) -> Config:
    base = config(tmp_path, *arguments)
    rollout = base.rollout.model_copy(update={"colocate": True, "url": url, "timeout_s": 60.0})
    return base.model_copy(
        update={"rollout": rollout, "sync": base.sync.model_copy(update={"verify": False, "prove_every": 0})}
    )


def noted(log: Path, *ignored: str) -> list[str]:
    return [line for line in log.read_text().splitlines() if line not in ignored]


def with_engine(tmp_path: Path, work: Callable[[ServerEngine, Watchdog], Awaitable[None]], *arguments: str) -> Watchdog:
    """`work` on an engine whose only server a watchdog looks after. Its fleet looks too."""

    async def run(watchdog: Watchdog) -> None:
        engine = ServerEngine(colocated(tmp_path, url=watchdog.url), KEY)
        engine._fleet.start()
        try:
            await work(engine, watchdog)
        finally:
            await engine.close()

    with Watchdog(Served.of(colocated(tmp_path, *arguments)), tmp_path / "rollout.log", KEY) as watchdog:
        asyncio.run(asyncio.wait_for(run(watchdog), 120))
    return watchdog


def push(tmp_path: Path, version: int) -> WeightPush:
    return WeightPush(version, str(tmp_path), ())


def test_nobody_asks_a_server_that_lent_its_memory_and_it_comes_back_in_order(tmp_path: Path, log: Path) -> None:
    async def work(engine: ServerEngine, _: Watchdog) -> None:
        for version in (1, 2, 3):
            await engine.load_weights(push(tmp_path, version))
            await engine.release_memory()
            await asyncio.sleep(LOOKS_S)
        await engine.load_weights(push(tmp_path, 4))
        await asyncio.sleep(LOOKS_S)

    watchdog = with_engine(tmp_path, work)
    assert watchdog.restarts == 0
    calls = [line.partition("?timeout")[0] for line in noted(log, "/health", "/model_info", "begins")]
    load = ["/pause_generation", "/update_weights_from_disk", "/continue_generation"]
    lend = ["/flush_cache", "/pause_generation", "/release_memory_occupation ['weights', 'kv_cache']"]
    lend += ["/resume_memory_occupation ['weights']", "/resume_memory_occupation ['kv_cache']"]
    assert calls == load + (lend + load) * 3


def test_memory_is_released_once_a_token_of_a_health_check_is_made(tmp_path: Path, log: Path) -> None:
    async def work(engine: ServerEngine, watchdog: Watchdog) -> None:
        await engine.load_weights(push(tmp_path, 1))
        for _ in range(3):
            stranger = threading.Thread(target=request, args=(watchdog.server, "/health"))
            stranger.start()
            await asyncio.sleep(0.05)
            await engine.release_memory()
            await engine.load_weights(push(tmp_path, 1))
            stranger.join()

    assert with_engine(tmp_path, work, "--token-s", "0.2").restarts == 0


def test_a_server_that_dies_while_its_memory_is_lent_is_started_again_once_there_is_room(
    tmp_path: Path, log: Path
) -> None:
    async def work(engine: ServerEngine, watchdog: Watchdog) -> None:
        await engine.load_weights(push(tmp_path, 1))
        await engine.release_memory()
        first = watchdog.server.process.pid
        os.kill(first, signal.SIGKILL)
        await asyncio.sleep(LOOKS_S)
        assert watchdog.restarts == 0, "its memory is the learner's still"
        await engine.load_weights(push(tmp_path, 2))
        assert engine._fleet.servers[0].version == 2
        await asyncio.to_thread(until, lambda: watchdog.server.process.pid != first)

    assert with_engine(tmp_path, work).restarts == 1
    assert not [line for line in noted(log) if line.startswith("died")]


def test_a_server_that_dies_before_it_lends_its_memory_does_not_end_the_run(tmp_path: Path, log: Path) -> None:
    async def work(engine: ServerEngine, watchdog: Watchdog) -> None:
        await engine.load_weights(push(tmp_path, 1))
        os.kill(watchdog.server.process.pid, signal.SIGKILL)
        watchdog.server.process.wait()
        await engine.release_memory()
        await engine.load_weights(push(tmp_path, 2))
        assert engine._fleet.servers[0].version == 2

    assert with_engine(tmp_path, work).restarts == 1


def test_no_sample_is_asked_for_while_memory_is_lent(tmp_path: Path, log: Path) -> None:
    async def work(engine: ServerEngine, _: Watchdog) -> None:
        await engine.load_weights(push(tmp_path, 1))
        await engine.release_memory()
        ask = asyncio.ensure_future(engine._fleet.ask({}))
        await asyncio.sleep(LOOKS_S)
        assert not ask.done()
        await engine.load_weights(push(tmp_path, 2))
        await ask

    assert with_engine(tmp_path, work).restarts == 0


def test_a_server_without_its_memory_is_not_asked_whether_it_was_restarted(tmp_path: Path, log: Path) -> None:
    async def work(engine: ServerEngine, _: Watchdog) -> None:
        await engine.load_weights(push(tmp_path, 1))
        await engine.release_memory()
        await engine._fleet.fence_restarted()
        assert not engine._fleet.servers[0].fenced
        await engine.load_weights(push(tmp_path, 2))

    assert with_engine(tmp_path, work).restarts == 0
    assert not [line for line in noted(log) if line.startswith("died")]


def test_a_server_that_takes_long_to_get_its_memory_back_is_not_asked_whether_it_is_there(
    tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resume = RemoteServer.resume_memory

    async def resume_late(server: RemoteServer) -> None:
        await asyncio.sleep(LOOKS_S)
        await resume(server)

    async def work(engine: ServerEngine, _: Watchdog) -> None:
        await engine.load_weights(push(tmp_path, 1))
        await engine.release_memory()
        monkeypatch.setattr(RemoteServer, "resume_memory", resume_late)
        await engine.load_weights(push(tmp_path, 2))
        assert engine._fleet.metrics()["rollout/losses"] == 0

    assert with_engine(tmp_path, work).restarts == 0
    assert not [line for line in noted(log) if line.startswith("died")]


def test_one_process_holds_a_loan_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loan_module, "WAIT_S", 0.1)
    controller, watcher = Loan("http://node1:7", KEY), Loan("http://127.0.0.1:7", KEY)
    assert watcher.try_take()
    with pytest.raises(EngineError, match="goes on asking"):
        asyncio.run(controller.take())
    watcher.release()
    asyncio.run(controller.take())
    assert controller.held
    assert not watcher.try_take()
    controller.release()
    stranger = Loan("http://127.0.0.1:7", "another key")
    assert stranger.try_take()
    assert watcher.try_take()
    for loan in (stranger, watcher):
        loan.release()


class Rank:
    """Learner, rollouts, texts and sender of a rank: notes what a pusher does with them."""

    proves_tensors = True

    def __init__(self, notes: list[str]) -> None:
        self.notes, self.meeting = notes, None

    def export_shard(self, *_: object) -> None:
        self.notes.append("export")

    def owned_tensors(self) -> tuple[()]:
        return ()

    def take(self, _: object, **__: object) -> tuple[()]:
        self.notes.append("texts")
        return ()

    def push(self, *_: object, **__: object) -> None:
        self.notes.append("push")

    @contextmanager
    def pushing(self, *_: object, **__: object) -> Iterator[None]:
        self.notes.append("push")
        yield

    def connect(self) -> None: ...

    def send(self, *_: object) -> None: ...


@pytest.mark.parametrize("colocated", [True, False])
def test_a_rank_gives_its_cached_blocks_back_before_the_engine_takes_its_memory(
    colocated: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: notes.append("empty"))
    rank, rounding = Rank(notes), Rounding("float32")
    own: Any = rank
    DiskPusher(own, own, tmp_path, rounding, own, colocated=colocated).push(1)
    given = ["empty"] * colocated
    assert notes == ["export", "texts", *given, "push"]
    notes.clear()
    BroadcastPusher(own, own, own, rounding, own, colocated=colocated).push(1)
    assert notes == ["texts", *given, "push"]


RELEASE: tuple[str, dict[str, object]] = ("/release_memory_occupation", {"tags": ["weights", "kv_cache"]})
RESUME = "/resume_memory_occupation"


@pytest.mark.parametrize(
    ("requests", "why"),
    [
        ([RELEASE, ("/health", None)], "/health while"),
        ([RELEASE, ("/model_info", None)], "/model_info while"),
        ([RELEASE, (RESUME, {"tags": ["kv_cache"]})], "resume of kv_cache while"),
        ([RELEASE, (RESUME, {"tags": ["weights"]}), ("/continue_generation", {})], "/continue_generation while"),
        ([(RESUME, {"tags": ["weights"]})], "resume of weights while [] are lent"),
    ],
)
def test_the_stand_in_dies_where_the_engine_does(
    requests: list[tuple[str, dict[str, object] | None]], why: str, tmp_path: Path, log: Path
) -> None:
    server = start_server(Served.of(colocated(tmp_path)), tmp_path / "rollout.log", KEY)
    try:
        for path, body in requests:
            assert server.poll() is None
            request(server, path, body)
        until(lambda: server.poll() is not None)
    finally:
        server.stop(grace_s=0.0)
    assert f"died: {why}" in noted(log)[-1]


def test_the_stand_in_dies_of_a_release_while_it_makes_a_token(tmp_path: Path, log: Path) -> None:
    server = start_server(Served.of(colocated(tmp_path, "--token-s", "3")), tmp_path / "rollout.log", KEY)
    try:
        threading.Thread(target=request, args=(server, "/health")).start()
        until(lambda: noted(log).count("a token begins") == 2)  # the first one is of the start
        request(server, *RELEASE)
        until(lambda: server.poll() is not None)
    finally:
        server.stop(grace_s=0.0)
    assert noted(log)[-1] == "died: release while something runs"


def request(server: Server, path: str, body: dict[str, object] | None = None) -> None:
    """Ask it, whatever becomes of it."""
    data = None if body is None else json.dumps(body).encode()
    with suppress(URLError, RemoteDisconnected, ConnectionError):
        urllib.request.urlopen(urllib.request.Request(server.url + path, data=data), timeout=30).close()
