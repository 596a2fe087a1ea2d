"""Two real servers, with SGLang's router in front of them and without: both sample, and both get every push.

One that misses a push is left out until it has it.
"""

from __future__ import annotations

import asyncio
import io
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from launch.job import free_port
from moe_trm.config.schema import Config, PipelineConfig
from moe_trm.observe.advice.verdict import verdict
from moe_trm.observe.lines import ProgressLines
from moe_trm.rollout.build import build_controller
from moe_trm.rollout.controller import RolloutController
from moe_trm.rollout.credentials import API_KEY_VARIABLE
from moe_trm.rollout.servers.backend import Served
from moe_trm.rollout.servers.fleet import Fleet
from moe_trm.rollout.servers.process import Server, start_server
from moe_trm.rollout.servers.remote import RemoteServer
from moe_trm.types import RolloutRecord, TrainBatch
from tests.integration.proxy import Proxy
from tests.integration.served import PARAMS, check_against_hf, make_push

GROUPS, GROUP_SIZE, STEPS = 4, 4, 5
NUM_CHECKS = 6
"""Requests of one token with which a server and the router before it are looked at when a run starts, at most."""
LOAD = "/update_weights_from_disk"
HEALTHY = {"engine/k3_kl": 0.0, "optimizer/grad_norm": 1.0, "reward/zero_variance_groups": 0.0}
PLACES = ("queued", "in_flight", "trained", "rejected", "dropped")


@pytest.fixture(scope="module")
def second_server(
    rollout_config: Config, rollout_server: Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    server = start_server(
        Served.of(rollout_config), tmp_path_factory.mktemp("second") / "rollout.log", rollout_server.api_key
    )
    yield server
    server.stop()


@pytest.fixture(scope="module")
def router(rollout_server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`python -m launch.router`, which begins without servers."""
    if find_spec("smg") is None:
        pytest.skip("SGLang's router is not installed: pip install 'moe-trm[router]'")
    folder, port = tmp_path_factory.mktemp("router"), free_port()
    url = f"http://127.0.0.1:{port}"
    (folder / "config.yaml").write_text("model: {checkpoint: unused}\n")
    command = [sys.executable, "-m", "launch.router", str(folder / "config.yaml"), f"rollout.router={url}"]
    with (folder / "router.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "rollout.urls=[http://127.0.0.1:1]"],
            env={**os.environ, API_KEY_VARIABLE: rollout_server.api_key},
            stdout=log,
            stderr=log,
        )
    for _ in range(600):
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            break
        assert process.poll() is None, (folder / "router.log").read_text()
        time.sleep(0.1)
    yield url
    process.terminate()
    process.wait(120)
    assert rollout_server.api_key not in (folder / "router.log").read_text()


def config(checkpoint: Path, urls: list[str], router: str | None) -> Config:
    return Config.model_validate(
        {
            "model": {"checkpoint": str(checkpoint)},
            "task": {"max_digits": 1, "eval_size": 0},
            "rollout": {
                "urls": urls,
                "router": router,
                "prompts_per_step": GROUPS,
                "group_size": GROUP_SIZE,
                "max_new_tokens": 12,
                "temperature": PARAMS.temperature,
                "top_p": PARAMS.top_p,
                "server": {"dtype": "float32"},
                "max_attempts": 2,
            },
            "replay": {"mode": "R3"},
            "pipeline": {"mode": "one_step"},
            "probe": {"every": 0},
            "train": {"steps": STEPS},
        }
    )


@asynccontextmanager
async def controlled(settings: Config, key: str) -> AsyncIterator[RolloutController]:
    controller = await build_controller(settings, key)
    try:
        await controller.start()
        yield controller
    finally:
        await controller.close()


def fleet_of(controller: RolloutController) -> Fleet:
    fleet: Any = controller._engine._fleet  # type: ignore[attr-defined]
    assert isinstance(fleet, Fleet)
    return fleet


def records(batch: TrainBatch) -> list[RolloutRecord]:
    return [row.record for mini in batch.mini_batches for micro in mini.micro_batches for row in micro.rows]


@pytest.mark.slow
@pytest.mark.parametrize("routed", [False, True], ids=["list", "router"])
def test_a_server_that_misses_a_push_is_left_out_until_it_has_it(
    routed: bool,
    request: pytest.FixtureRequest,
    rollout_server: Server,
    second_server: Server,
    tiny_moe: Path,
    other_moe: Path,
    tmp_path: Path,
) -> None:
    weights = [tiny_moe, other_moe, tiny_moe, other_moe, tiny_moe]
    key = rollout_server.api_key

    async def push(controller: RolloutController, version: int) -> None:
        await controller.load_weights(make_push(tmp_path, weights[version], version))

    async def run() -> list[TrainBatch]:
        one, two = Proxy(rollout_server.url), Proxy(second_server.url)
        async with one.open() as first, two.open() as second:
            address = request.getfixturevalue("router") if routed else None
            async with controlled(config(tiny_moe, [first, second], address), key) as controller:
                fleet = fleet_of(controller)
                await push(controller, 0)
                assert [server.version for server in fleet.servers] == [0, 0]
                batches = await controller.plan(1, data_size=1)
                assert min(proxy.passed["/generate"] for proxy in (one, two)) > NUM_CHECKS
                # A push that does not reach the second server: the first one serves alone.
                two.shut.add(LOAD)
                await push(controller, 1)
                assert [server.version for server in fleet.servers] == [1, 0]
                assert controller._engine.metrics()["rollout/servers"] == 1
                asked = two.passed["/generate"]
                batches += await controller.plan(2, data_size=1)
                await push(controller, 2)
                batches += await controller.plan(3, data_size=1)
                assert two.passed["/generate"] == asked
                # It takes weights again: it is given the newest ones, and samples again.
                two.shut.clear()
                async with asyncio.timeout(300):
                    while controller._engine.metrics()["rollout/recoveries"] == 0:
                        await asyncio.sleep(0.1)
                assert [server.version for server in fleet.servers] == [2, 2]
                if routed:  # the router takes a server that it gave up back only after a while
                    async with asyncio.timeout(300):
                        while two.passed["/generate"] == asked:
                            await fleet.ask({"input_ids": [5], "sampling_params": {"max_new_tokens": 1}})
                asked = two.passed["/generate"]
                await push(controller, 3)
                for step in (4, 5):
                    batches += await controller.plan(step, data_size=1)
                assert [server.version for server in fleet.servers] == [3, 3]
                assert two.passed["/generate"] > asked
                return batches

    batches = asyncio.run(run())
    trained = [record.sample_id for batch in batches for record in records(batch)]
    assert len(trained) == len(set(trained)) == STEPS * GROUPS * GROUP_SIZE
    for step, batch in enumerate(batches, 1):
        assert batch.metrics["ledger/issued"] == sum(batch.metrics[f"ledger/{place}"] for place in PLACES)
        assert batch.metrics["rollout/age_max"] == min(step - 1, 1)
        for record in records(batch):
            [version] = np.unique(record.versions)
            assert version == max(step - 2, 0)
        # The label is that of the weights which sampled: log-probs, masks and routes are theirs.
        for record in records(batch)[:2]:
            check_against_hf(record, weights[max(step - 2, 0)])


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}], ids=["none", "wrong"])
def test_the_router_does_nothing_without_the_key(router: str, headers: dict[str, str]) -> None:
    async def ask() -> list[int]:
        statuses = []
        async with aiohttp.ClientSession(router, headers=headers) as session:
            for method, path in (("POST", "/generate"), ("GET", "/workers"), ("POST", "/workers")):
                async with session.request(
                    method, path, json={"input_ids": [1], "url": "http://127.0.0.1:1"}
                ) as answer:
                    statuses.append(answer.status)
        return statuses

    assert asyncio.run(ask()) == [401, 401, 401]


@pytest.mark.slow
@pytest.mark.parametrize("routed", [False, True], ids=["list", "router"])
def test_a_server_that_hangs_in_the_middle_of_a_batch_costs_no_sample(
    routed: bool,
    request: pytest.FixtureRequest,
    rollout_server: Server,
    second_server: Server,
    tiny_moe: Path,
    tmp_path: Path,
) -> None:
    address = request.getfixturevalue("router") if routed else None
    settings = config(tiny_moe, [rollout_server.url, second_server.url], address)
    settings = settings.model_copy(update={"rollout": settings.rollout.model_copy(update={"max_new_tokens": 200})})

    async def run() -> list[TrainBatch]:
        async with controlled(settings, rollout_server.api_key) as controller:
            await controller.load_weights(make_push(tmp_path, tiny_moe, 0))
            planning = asyncio.ensure_future(controller.plan(1, data_size=1))
            second = next(server for server in fleet_of(controller).servers if server.http.url == second_server.url)
            while not second.in_flight:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)  # the requests are on their way to it
            assert not planning.done()
            os.killpg(second_server.process.pid, signal.SIGSTOP)
            try:
                batches = await planning
            finally:
                os.killpg(second_server.process.pid, signal.SIGCONT)
            assert controller._engine.metrics()["rollout/servers"] == 1
            async with asyncio.timeout(300):
                while controller._engine.metrics()["rollout/recoveries"] == 0:
                    await asyncio.sleep(0.1)
            await controller.load_weights(make_push(tmp_path, tiny_moe, 1))
            assert [server.version for server in fleet_of(controller).servers] == [1, 1]
            return batches + await controller.plan(2, data_size=1)

    batches = asyncio.run(run())
    trained = [record.sample_id for batch in batches for record in records(batch)]
    assert len(trained) == len(set(trained)) == 2 * GROUPS * GROUP_SIZE
    for batch in batches:
        assert batch.metrics["ledger/issued"] == sum(batch.metrics[f"ledger/{place}"] for place in PLACES)
        assert all(set(record.versions.tolist()) == {0} for record in records(batch))
    assert batches[-1].metrics["rollout/reissued"] > 0


@pytest.mark.slow
def test_servers_that_load_in_turn_serve_two_versions_side_by_side(
    rollout_server: Server, second_server: Server, tiny_moe: Path, other_moe: Path, tmp_path: Path
) -> None:
    """The second server samples under the version before while the first loads, then the other way round."""
    settings = config(tiny_moe, [rollout_server.url, second_server.url], None)
    pipeline = PipelineConfig(mode="async", max_staleness=2, rolling_push=True)
    settings = settings.model_copy(update={"pipeline": pipeline})
    weights = [tiny_moe, other_moe]
    beside: list[set[int | None]] = []

    async def run() -> list[TrainBatch]:
        async with controlled(settings, rollout_server.api_key) as controller:
            fleet, batches = fleet_of(controller), []
            load = fleet._load

            async def watched(server: RemoteServer) -> None:
                beside.append({other.version for other in fleet.servers if fleet._may_sample(other)})
                await load(server)

            fleet._load = watched
            for step in range(1, STEPS + 1):
                version = step - 1
                push = make_push(tmp_path, weights[version % 2], version)
                loading = asyncio.ensure_future(controller.load_weights(push))
                if step == 1:
                    await loading
                batches += await controller.plan(step, data_size=1)
                await loading
            return batches

    batches = asyncio.run(run())
    turns = [[{version - 1}, {version}] for version in range(1, STEPS)]
    assert beside[2:] == [one for pair in turns for one in pair]
    trained = [record.sample_id for batch in batches for record in records(batch)]
    assert len(trained) == len(set(trained)) == STEPS * GROUPS * GROUP_SIZE
    for batch in batches:
        assert batch.metrics["ledger/issued"] == sum(batch.metrics[f"ledger/{place}"] for place in PLACES)
        assert batch.metrics["rollout/age_max"] <= 2
        for record in records(batch):
            [version] = np.unique(record.versions)
            assert 0 <= batch.step - 1 - version <= 2
        for record in records(batch)[:2]:
            check_against_hf(record, weights[int(record.versions[0]) % 2])


@pytest.mark.slow
def test_a_server_that_is_killed_in_the_middle_of_a_batch_is_seen_at_once_with_its_reason(
    rollout_server: Server, second_server: Server, tiny_moe: Path, tmp_path: Path
) -> None:
    """The last test of this file: the second server does not come back. The first one makes all samples."""
    settings = config(tiny_moe, [rollout_server.url, second_server.url], None)
    settings = settings.model_copy(update={"rollout": settings.rollout.model_copy(update={"max_new_tokens": 200})})
    told = io.StringIO()

    async def run() -> TrainBatch:
        lines = ProgressLines(STEPS, told)
        async with controlled(settings, rollout_server.api_key) as controller:
            await controller.load_weights(make_push(tmp_path, tiny_moe, 0))
            lines.servers(controller.servers())
            planning = asyncio.ensure_future(controller.plan(1, data_size=1))
            while not fleet_of(controller).servers[1].in_flight:
                await asyncio.sleep(0.01)
            os.killpg(second_server.process.pid, signal.SIGKILL)
            async with asyncio.timeout(300):
                while controller.servers()[1].lost_s is None:
                    await asyncio.sleep(0.1)
            lines.servers(controller.servers())
            [batch] = await planning
            return batch

    batch = asyncio.run(run())
    [line] = told.getvalue().splitlines()
    assert f"rollout server {second_server.url} is out of service: the rollout server is not reachable" in line
    assert [batch.metrics[f"rollout/{name}"] for name in ("servers", "servers_lost", "losses")] == [1, 1, 1]
    assert batch.metrics["rollout/lost_s"] > 0
    assert len(records(batch)) == GROUPS * GROUP_SIZE
    assert verdict([dict(batch.metrics) | HEALTHY]).sentence.startswith("1 of 2 rollout servers is out of service")
