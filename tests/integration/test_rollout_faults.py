"""A real server that is killed or stopped in the middle of a batch: it comes back, every sample is trained once."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from benchmarks.short_run import metrics_of
from moe_trm.config.schema import Config
from moe_trm.rollout.build import build_controller
from moe_trm.rollout.controller import RolloutController
from moe_trm.rollout.servers.backend import Served
from moe_trm.rollout.servers.process import Server, start_server
from moe_trm.rollout.servers.watchdog import Watchdog
from moe_trm.types import TrainBatch
from tests.drills.resume_drill import books_balance
from tests.integration.jobs import still_running, write_config
from tests.integration.proxy import Proxy
from tests.integration.served import make_push

RECOVERY_S = 60.0
"""Seconds on two free cores. On busy ones the start of a server alone takes longer: then 1.5 times the first start."""
GROUPS, GROUP_SIZE = 6, 8


KEY = "key of the drill"


def config(checkpoint: Path, url: str | None = None) -> Config:
    return Config.model_validate(
        {
            "model": {"checkpoint": str(checkpoint)},
            "task": {"max_digits": 1, "eval_size": 0},
            "rollout": {
                "url": url,
                "prompts_per_step": GROUPS,
                "group_size": GROUP_SIZE,
                "max_new_tokens": 48,
                "concurrency": 16,
                "server": {"port": 0, "max_total_tokens": 8192, "max_running_requests": 4},
            },
            "sampling_mask": {"mode": "keep"},
            "probe": {"every": 0},
            "pipeline": {"mode": "one_step"},
            "train": {"steps": 2},
        }
    )


@pytest.mark.slow
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_lost_in_the_middle_of_a_batch_costs_no_sample(
    fault: signal.Signals, brief_checkpoint: Path, tmp_path: Path
) -> None:
    async def drill(watchdog: Watchdog) -> tuple[list[TrainBatch], float]:
        controller = await build_controller(config(brief_checkpoint, watchdog.url), KEY)
        try:
            await controller.start()
            await controller.load_weights(make_push(tmp_path, brief_checkpoint, 0, "bfloat16"))
            planning = asyncio.ensure_future(controller.plan(1, data_size=1))
            await until_busy(controller)
            os.killpg(watchdog.server.process.pid, fault)
            started = time.monotonic()
            while not controller._engine.metrics()["rollout/recoveries"]:
                await asyncio.sleep(0.1)
                assert time.monotonic() - started < 4 * RECOVERY_S
            seconds = time.monotonic() - started
            [first] = await planning
            await controller.load_weights(make_push(tmp_path, brief_checkpoint, 1, "bfloat16"))
            [second] = await controller.plan(2, data_size=1)
            return [first, second], seconds
        finally:
            await controller.close()

    started = time.monotonic()
    with Watchdog(Served.of(config(brief_checkpoint)), tmp_path / "rollout.log", KEY) as watchdog:
        start_s = time.monotonic() - started
        batches, seconds = asyncio.run(drill(watchdog))
        restarts = watchdog.restarts
    print(f"{fault.name}: started in {start_s:.1f} s; back and proved {seconds:.1f} s after it was lost")
    assert restarts == 1
    trained = [sample for batch in batches for sample in sample_ids(batch)]
    metrics = batches[-1].metrics
    assert metrics["rollout/reissued"] > 0
    assert len(trained) == len(set(trained)) == metrics["ledger/trained"]
    assert all(books_balance([batch.metrics]) for batch in batches)
    assert metrics["ledger/trained"] + metrics["ledger/rejected"] == 2 * GROUPS * GROUP_SIZE
    assert metrics["ledger/dropped"] == 0
    assert seconds < max(RECOVERY_S, 1.5 * start_s + 15.0)


@pytest.mark.slow
def test_a_storm_of_errors_in_the_middle_of_a_batch_costs_no_sample(brief_checkpoint: Path, tmp_path: Path) -> None:
    async def drill(server: Server) -> tuple[TrainBatch, int]:
        proxy = Proxy(server.url)
        async with proxy.open() as url:
            controller = await build_controller(config(brief_checkpoint, url), KEY)
            try:
                await controller.start()
                await controller.load_weights(make_push(tmp_path, brief_checkpoint, 0, "bfloat16"))
                planning = asyncio.ensure_future(controller.plan(1, data_size=1))
                await until_busy(controller)
                proxy.shut.add("*")
                await asyncio.sleep(5)
                proxy.shut.clear()
                [batch] = await planning
                return batch, proxy.refused
            finally:
                await controller.close()

    server = start_server(Served.of(config(brief_checkpoint)), tmp_path / "rollout.log", KEY)
    try:
        batch, refused = asyncio.run(drill(server))
    finally:
        server.stop()
    assert refused > 5
    ids = sample_ids(batch)
    assert len(ids) == len(set(ids)) == GROUPS * GROUP_SIZE - batch.metrics["ledger/rejected"]
    assert "records/rejected/engine_failed" not in batch.metrics
    assert books_balance([batch.metrics])


@pytest.mark.slow
def test_when_the_job_is_killed_in_the_middle_of_a_step_nothing_stays_and_the_same_command_goes_on(
    brief_checkpoint: Path, tmp_path: Path
) -> None:
    """`moe-trm train` gets SIGKILL: server, workers, ranks and controller end within seconds, and the port is free.

    Sampling runs ahead of training. What was waiting or being sampled is sampled anew by the second part of the run.
    """
    path, run = write_config(tmp_path, brief_checkpoint), tmp_path / "runs" / "live"
    command = [sys.executable, "-m", "moe_trm", "train", str(path), "learner.parallel.expert=1", "pipeline.mode=async"]
    command += ["checkpoint.every=1"]
    with (tmp_path / "job.log").open("wb") as log:
        job = subprocess.Popen([*command, "train.steps=100"], stdout=log, stderr=log)
    while len(metrics_of(run)) < 4:
        assert job.poll() is None, (tmp_path / "job.log").read_text()
        time.sleep(0.1)
    everyone = psutil.Process(job.pid).children(recursive=True)
    ports = {
        proxy.laddr.port for process in everyone for proxy in process.net_connections() if proxy.status == "LISTEN"
    }
    names = " ".join(" ".join(process.cmdline()) for process in everyone)
    assert all(name in names for name in ("sglang", "launch.train", "moe_trm.rollout.service"))
    job.kill()
    job.wait()
    assert not still_running(everyone, 120)
    assert ports
    assert not {proxy.laddr.port for proxy in psutil.net_connections() if proxy.status == "LISTEN"} & ports

    steps = len(metrics_of(run)) + 1
    command += ["checkpoint.allow_changes=true", f"train.steps={steps}"]
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "going on after step" in again.stdout
    rows = metrics_of(run)
    assert [row["step"] for row in rows] == list(range(steps + 1))
    assert books_balance(rows)
    assert max(row["rollout/age_max"] for row in rows[1:]) <= 2
    assert rows[-1]["ledger/in_flight"] == rows[-1]["ledger/queued"] == 0
    assert rows[-1]["ledger/trained"] + rows[-1]["ledger/rejected"] + rows[-1]["ledger/dropped"] == 16 * steps


async def until_busy(controller: RolloutController) -> None:
    """Some samples of the batch are done, others are being made."""
    while controller._ledger.queued == 0:
        await asyncio.sleep(0.01)
    assert controller._ledger.in_flight > 0


def sample_ids(batch: TrainBatch) -> list[int]:
    return [row.record.sample_id for mini in batch.mini_batches for micro in mini.micro_batches for row in micro.rows]
