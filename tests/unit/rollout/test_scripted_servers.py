"""An engine with servers that a file brings along: started, asked, pushed to, killed and restarted by the harness.

Nothing outside `scripted_backend.py` and its server knows of it. The servers are real processes.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
import torch

from moe_trm.config.rules import refusals
from moe_trm.config.schema import Config
from moe_trm.errors import ConfigError, EngineError, SyncError
from moe_trm.rollout.build import build_engine
from moe_trm.rollout.server_engine import ServerEngine
from moe_trm.rollout.servers.backend import Served, backend_of
from moe_trm.rollout.servers.process import Server, start_server
from moe_trm.rollout.servers.use_proof import ServerUnfit
from moe_trm.rollout.servers.watchdog import Watchdog
from moe_trm.sync.disk import finish_push, write_shard
from moe_trm.sync.manifest import ScoredText, WeightPush
from moe_trm.sync.rounding import Rounding
from moe_trm.tools.doctor.served import attached
from moe_trm.types import Prompt, RolloutRecord, SamplingParams
from tests.unit.rollout.script_server import LOGPROB, SCRIPT
from tests.unit.rollout.test_sglang_engine import HF

SCRIPTED = f"{Path(__file__).with_name('scripted_backend.py')}:ScriptedBackend"
PARAMS = SamplingParams(max_new_tokens=8, stop_token_ids=(2,))
PROMPT = Prompt("p", (3, 4))
KEY = "key-of-the-script"
T = TypeVar("T")


def config(tmp_path: Path, *extra: str, **rollout: Any) -> Config:
    (tmp_path / "config.json").write_text(json.dumps(HF))
    server = {"port": 0, "extra_args": extra, "dtype": "float32"}
    sections: dict[str, Any] = {"pipeline": rollout.pop("pipeline", {}), "run_dir": str(tmp_path)}
    return Config.model_validate(
        {
            "model": {"checkpoint": str(tmp_path)},
            "rollout": {"engine": SCRIPTED, "server": server, "max_attempts": 1, **rollout},
            "replay": {"mode": "none"},
            "probe": {"every": 0},
            "sampling_mask": {"mode": "off"},
            **sections,
        }
    )


def push(tmp_path: Path, version: int) -> WeightPush:
    folder = tmp_path / f"v{version}"
    tensors = {"a": torch.full((2, 3), float(version)), "b": torch.arange(4.0)}
    shard = write_shard(folder / "model-0.safetensors", tensors.items(), Rounding("float32"))
    return finish_push(str(folder), shard, version, str(tmp_path))


def with_engine(settings: Config, server: Server, work: Callable[[ServerEngine], Awaitable[T]]) -> T:
    async def run() -> T:
        rollout = settings.rollout.model_copy(update={"url": settings.rollout.url or server.url})
        engine = build_engine(settings.model_copy(update={"rollout": rollout}), KEY)
        assert isinstance(engine, ServerEngine)
        try:
            await engine.start()
            return await work(engine)
        finally:
            await engine.close()

    return asyncio.run(run())


async def sampled(engine: ServerEngine, count: int) -> list[RolloutRecord]:
    asked = (engine.generate(PROMPT, PARAMS, sample_id=number, group_id=0) for number in range(count))
    return list(await asyncio.gather(*asked))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("script")
    running = start_server(Served.of(config(folder)), folder / "rollout.log", KEY)
    yield running
    running.stop()


def test_it_answers_with_the_weights_of_the_last_push(server: Server, tmp_path: Path) -> None:
    async def work(engine: ServerEngine) -> list[RolloutRecord]:
        await engine.load_weights(push(tmp_path, 4))
        first = await sampled(engine, 4)
        await engine.load_weights(push(tmp_path, 5))
        return first + await sampled(engine, 4)

    records = with_engine(config(tmp_path), server, work)
    assert sorted({tuple(record.tokens[2:].tolist()) for record in records}) == sorted((*line, 2) for line in SCRIPT)
    assert [set(record.versions.tolist()) for record in records] == [{4}] * 4 + [{5}] * 4


def test_another_key_is_refused(server: Server, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="HTTP 401"):
        asyncio.run(_ask(config(tmp_path, url=server.url), "another"))


async def _ask(settings: Config, key: str) -> None:
    engine = build_engine(settings, key)
    try:
        await engine.start()
    finally:
        await engine.close()


def test_weights_that_the_server_misread_end_the_run(tmp_path: Path) -> None:
    running = start_server(Served.of(config(tmp_path, "--misreads")), tmp_path / "rollout.log", KEY)
    try:
        with pytest.raises(SyncError, match="other tensors"):
            with_engine(config(tmp_path), running, lambda engine: engine.load_weights(push(tmp_path, 1)))
    finally:
        running.stop()


def scored(made: WeightPush) -> WeightPush:
    """A push with a text as the learner scores it, and as the script does."""
    return msgspec.structs.replace(made, texts=(ScoredText((1, 2, 3), (LOGPROB - made.version,) * 2),))


def test_a_server_that_decodes_with_the_first_weights_stops_the_run_after_a_second_push(tmp_path: Path) -> None:
    running = start_server(Served.of(config(tmp_path, "--stale")), tmp_path / "rollout.log", KEY)

    async def work(engine: ServerEngine) -> dict[str, float]:
        await engine.load_weights(scored(push(tmp_path, 1)))
        await engine.load_weights(push(tmp_path, 1))  # not due, so nobody asks
        clean = engine.metrics()
        with pytest.raises(ServerUnfit, match=r"differs from the same engine's prefill by 1 nats .* stale"):
            await engine.load_weights(scored(push(tmp_path, 2)))
        assert engine.servers()[0].lost_s is None
        return clean

    try:
        clean = with_engine(config(tmp_path), running, work)
    finally:
        running.stop()
    assert clean["weights/decode_gap"] == clean["weights/learner_gap"] == 0
    assert (tmp_path / "rollout.log").read_text().count("loaded 2") == 2


@pytest.mark.parametrize("rolling", [False, True])
def test_the_run_goes_on_without_a_server_that_decodes_with_the_first_weights(rolling: bool, tmp_path: Path) -> None:
    pair = [
        start_server(Served.of(config(tmp_path, *extra)), tmp_path / f"{len(extra)}.log", KEY)
        for extra in ((), ("--stale",))
    ]

    async def work(engine: ServerEngine) -> list[RolloutRecord]:
        for version in (1, 2, 3):
            await engine.load_weights(scored(push(tmp_path, version)))
        [good, stale] = engine.servers()
        assert good.lost_s is None
        assert "stale" in stale.why
        return await sampled(engine, 4)

    pipeline = {"mode": "async", "rolling_push": rolling} if rolling else {}
    settings = config(tmp_path, urls=[server.url for server in pair], pipeline=pipeline)
    try:
        records = with_engine(settings, pair[0], work)
    finally:
        for server in pair:
            server.stop()
    assert [set(record.versions.tolist()) for record in records] == [{3}] * 4
    assert "loaded 3" not in (tmp_path / "1.log").read_text()


def test_a_server_that_is_not_proved_by_use_has_no_version(tmp_path: Path) -> None:
    """Weights that do not pass are not served: a repair would take the label of the push for a proof."""
    running = start_server(Served.of(config(tmp_path)), tmp_path / "rollout.log", KEY)

    async def work(engine: ServerEngine) -> None:
        wrong = msgspec.structs.replace(push(tmp_path, 1), texts=(ScoredText((1, 2), (-9.0,)),))
        with pytest.raises(ServerUnfit, match="wrong weights or another configuration"):
            await engine.load_weights(wrong)
        assert [server.version for server in engine._fleet.servers] == [None]

    try:
        with_engine(config(tmp_path), running, work)
    finally:
        running.stop()


def test_a_push_interrupts_an_answer_which_goes_on_with_the_new_weights(tmp_path: Path) -> None:
    log, slow = tmp_path / "rollout.log", ("--token-s", "60", "--slow-to", "1")
    running = start_server(Served.of(config(tmp_path, *slow)), log, KEY)

    async def work(engine: ServerEngine) -> RolloutRecord:
        await engine.load_weights(push(tmp_path, 1))
        answer = asyncio.ensure_future(engine.generate(PROMPT, PARAMS, sample_id=0, group_id=0))
        while "answer 0: 1 so far" not in log.read_text():
            await asyncio.sleep(0.02)
        await engine.load_weights(push(tmp_path, 2))
        return await answer

    settings = config(tmp_path, pipeline={"mode": "async", "partial": "interrupt"})
    try:
        record = with_engine(settings, running, work)
    finally:
        running.stop()
    assert sorted(set(record.versions.tolist())) == [1, 2]
    assert tuple(record.tokens[2:].tolist())[-1] == 2


def test_a_server_that_is_killed_is_restarted_and_given_its_weights_again(tmp_path: Path) -> None:
    settings = config(tmp_path)
    with Watchdog(Served.of(settings), tmp_path / "rollout.log", KEY) as watchdog:
        first = watchdog.server

        async def work(engine: ServerEngine) -> list[RolloutRecord]:
            await engine.load_weights(push(tmp_path, 3))
            os.killpg(first.process.pid, signal.SIGKILL)
            records = await sampled(engine, 8)
            assert engine.metrics()["rollout/recoveries"] == 1
            return records

        records = with_engine(settings, first, work)
        assert watchdog.restarts == 1
        second = watchdog.server
    assert all(set(record.versions.tolist()) == {3} for record in records)
    assert (tmp_path / "rollout.log").read_text().count("loaded 3") == 2
    deadline = time.monotonic() + 30
    while second.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert second.poll() is not None


def test_the_doctor_skips_what_its_servers_do_not_say(server: Server, tmp_path: Path) -> None:
    settings = config(tmp_path, url=server.url, api_key=KEY)
    found = list(attached(settings.rollout, settings.model.checkpoint))
    assert {check.status for check in found if check.name.startswith("model")} == {"skip"}


def test_its_memory_is_not_lent_and_routes_are_not_recorded(tmp_path: Path) -> None:
    settings = config(tmp_path, colocate=True)
    settings = settings.model_copy(update={"replay": settings.replay.model_copy(update={"mode": "R3"})})
    assert {"rollout.colocate", "rollout.engine"} <= {problem.key for problem in refusals(settings)}


def test_a_class_that_is_no_backend_is_refused(tmp_path: Path) -> None:
    module = tmp_path / "half_engine.py"
    module.write_text("class Half: pass\nclass Needs:\n    def __init__(self, config): pass\n")
    for name in ("Half", "Needs"):
        with pytest.raises(ConfigError, match="does not say how they are asked"):
            backend_of(f"{module}:{name}")
