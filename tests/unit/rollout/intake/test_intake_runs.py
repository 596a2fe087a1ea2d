"""Whole steps with and without intake processes: batches, books, bundles and what a resumed run does are the same."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from moe_trm.config.schema import Config
from moe_trm.rollout.client import RolloutClient
from moe_trm.rollout.controller import RolloutController
from moe_trm.rollout.server_engine import ServerEngine
from moe_trm.rollout.service import ControllerService, Start
from moe_trm.runtime import wire
from moe_trm.runtime.shared_blocks import place_of
from moe_trm.sync.manifest import WeightPush
from moe_trm.tasks import RewardInput
from moe_trm.types import Prompt, SamplingParams, TrainBatch
from tests.unit.rollout.fake_engine import FakeTask, rows_of
from tests.unit.rollout.intake.scripted_server import HF, ScriptedServer
from tests.unit.rollout.test_sglang_engine import config as checkpoint_config

STEPS, GROUPS, SIZE = 3, 6, 2
WHERE = ("ledger/queued", "ledger/in_flight")
"""Where a sample is that is not trained yet: that depends on the time of its answer."""
PARAMS = SamplingParams(max_new_tokens=16, stop_token_ids=(2,), top_k=8)


class Prompts(FakeTask):
    """Prompts of which some are answered with a broken record."""

    def train_prompts(self, step: int, count: int) -> list[Prompt]:
        return [Prompt(f"{step}-{i}", (1, 3, step, 5 + (5 * step + i) % 20)) for i in range(count)]

    async def reward(self, sample: RewardInput) -> object:
        return float(sum(sample.completion_ids) % 3)


def settings(folder: Path, url: str, processes: int, **sections: Any) -> Config:
    rollout = {
        "url": url,
        "max_attempts": 1,
        "timeout_s": 200.0,
        "intake_processes": processes,
        "prompts_per_step": GROUPS,
        "group_size": SIZE,
    }
    defaults: dict[str, Any] = {
        "sampling_mask": {"mode": "keep"},
        "replay": {"mode": "R3"},
        "sync": {"verify": False},
        "pipeline": {"mode": "async", "max_staleness": 1},
        "train": {"steps": STEPS},
        "batch": {"refill_limit": 1.0},  # when a group is replaced depends on the time of its last answer
        "learner": {"minibatches": 2, "micro_batch_rows": 3},
    }
    return checkpoint_config(folder, HF, rollout=rollout, **defaults | sections)


@dataclass
class Run:
    """The batches of a run, and its last state."""

    batches: list[list[TrainBatch]] = field(default_factory=list)
    state: Mapping[str, Any] = field(default_factory=dict)


async def run_steps(config: Config, steps: range, state: Mapping[str, Any] | None, *, kill: bool = False) -> Run:
    """The learner's side of `steps`: a push after each. `kill`: processes die at random meanwhile."""
    engine, chance = ServerEngine(config, "k"), random.Random(0)
    controller = RolloutController(config, engine, Prompts(), PARAMS)
    killer = asyncio.ensure_future(_kill_some(engine, chance)) if kill else None
    run = Run()
    try:
        if state is not None:
            controller.restore(state)
        await controller.load_weights(WeightPush(steps.start - 1, config.model.checkpoint, ()))
        for step in steps:
            run.batches.append(await controller.plan(step, data_size=2))
            run.state = controller.state()
            await controller.load_weights(WeightPush(step, config.model.checkpoint, ()))
        return run
    finally:
        if killer is not None:
            killer.cancel()
        await controller.close()


async def _kill_some(engine: ServerEngine, chance: random.Random) -> None:
    pool = engine._intake
    assert pool is not None
    kills = 0
    while kills < 3:  # so no answer can be lost more often than it is asked for again
        if any(process.num_open for process in pool._running):
            kills += 1
            with suppress(ProcessLookupError):
                os.kill(chance.choice(pool.process_ids), signal.SIGKILL)
        # The first one soon: a fast machine is through in a moment.
        await asyncio.sleep(chance.random() / 10 if kills else 0.001)


def comparable(batches: list[list[TrainBatch]]) -> list[object]:
    """Rows bit for bit, and the metrics that no clock and no process has a part in."""
    clocks = ("time/", "rollout/tokens_per_s", "rollout/intake", "rollout/lost_s", "queue/", *WHERE)
    return [
        (
            [[bytes(frame) for frame in wire.encode(share.mini_batches)] for share in shares],
            {name: value for name, value in shares[0].metrics.items() if not name.startswith(clocks)},
            shares[0].versions,
        )
        for shares in batches
    ]


def served(work: Any) -> Any:
    async def run() -> Any:
        server = ScriptedServer()
        await server.start()
        try:
            return await asyncio.wait_for(work(server), 300)
        finally:
            await server.stop()

    return asyncio.run(run())


def test_batches_books_and_bundles_are_the_same(tmp_path: Path) -> None:
    """With stale samples, and rejected ones among good ones. Order, ages and ledger are in the metrics."""

    async def work(server: ScriptedServer) -> list[Run]:
        runs = []
        for name, processes, kill in (("without", 0, False), ("within", 2, False), ("dying", 2, True)):
            config = settings(tmp_path, server.url, processes, record={"bundle": str(tmp_path / name)})
            runs.append(await run_steps(config, range(1, STEPS + 1), None, kill=kill))
        return runs

    without, within, dying = served(work)
    assert comparable(within.batches) == comparable(without.batches)
    assert comparable(dying.batches) == comparable(without.batches)
    assert within.state == without.state == dying.state
    last = without.batches[-1][0].metrics
    assert last["ledger/rejected"] > 0
    assert without.batches[1][0].metrics["rollout/stale_tokens"] > 0
    for run in (without, within, dying):
        for books in (shares[0].metrics for shares in run.batches):
            places = sum(books[f"ledger/{place}"] for place in ("trained", "rejected", "dropped"))
            assert books["ledger/issued"] == places + sum(books[place] for place in WHERE)
    assert dying.batches[-1][0].metrics["rollout/intake_losses"] > 0
    for step in range(1, STEPS + 1):
        name = f"step-{step:06d}.safetensors"
        bundle = (tmp_path / "without" / name).read_bytes()
        assert (tmp_path / "within" / name).read_bytes() == bundle
        assert (tmp_path / "dying" / name).read_bytes() == bundle


def test_a_run_is_resumed_with_another_number_of_processes(tmp_path: Path) -> None:
    def sync(processes: int) -> Config:
        return settings(tmp_path, url[0], processes, pipeline={"mode": "sync"})

    url: list[str] = []

    async def work(server: ScriptedServer) -> None:
        url.append(server.url)
        whole = await run_steps(sync(0), range(1, STEPS + 1), None)
        for first, second in ((0, 1), (1, 0)):
            begun = await run_steps(sync(first), range(1, STEPS), None)
            ended = await run_steps(sync(second), range(STEPS, STEPS + 1), begun.state)
            found = [comparable(run.batches)[-1] for run in (whole, ended)]
            assert found[0][0] == found[1][0]  # type: ignore[index]
            assert ended.state["ledger"] == whole.state["ledger"]

    served(work)


@contextmanager
def serving(config: Config, endpoint: str) -> Iterator[None]:
    """A controller service with real intake processes, in a thread."""

    async def serve() -> None:
        controller = RolloutController(config, ServerEngine(config, "k"), Prompts(), PARAMS)
        await controller.load_weights(WeightPush(0, config.model.checkpoint, ()))
        await ControllerService(controller, Start(endpoint, "key", {}, None), "").serve()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    yield
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.parametrize("layers", [(0, 2, 3), (2,)])
def test_ranks_copy_their_rows_from_shared_memory(tmp_path: Path, layers: tuple[int, ...]) -> None:
    """Each rank gets what it gets without intakes, in a message of one frame."""

    def rows(processes: int, url: str) -> list[object]:
        endpoint = f"ipc://{tmp_path}/controller-{processes}-{len(layers)}"
        frames = []
        with serving(settings(tmp_path, url, processes, pipeline={"mode": "sync"}), endpoint):
            clients = [RolloutClient(endpoint, "key", ranks=(rank, 2), data=(rank, 2)) for rank in range(2)]
            shares = []
            for client in clients:
                client._send("batch", step=1, layer_ids=layers, lends=True)
                while not client._socket.poll(500):
                    continue
                frames.append(len(client._socket.recv_multipart()))
                shares.append(client.next_batch(1, layers))
            clients[0]._ask("stop")
            for client in clients:
                client._socket.close()
        assert all(place_of(row.record.tokens) is None for row in rows_of(shares))
        assert {tuple(row.record.routes.layer_ids) for row in rows_of(shares)} == {layers}
        found.append(frames)
        return [comparable([[share]])[0][0] for share in shares]  # type: ignore[index]

    found: list[list[int]] = []

    async def work(server: ScriptedServer) -> tuple[list[object], list[object]]:
        return await asyncio.to_thread(rows, 0, server.url), await asyncio.to_thread(rows, 1, server.url)

    without, within = served(work)
    assert without == within
    assert found[1] == [1, 1]
    assert min(found[0]) > 1
