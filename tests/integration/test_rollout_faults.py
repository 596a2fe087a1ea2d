"""A real server that is killed or stopped in the middle of a batch: it comes back by itself, and every sample is trained exactly once."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from moe_trm.config.schema import Config
from moe_trm.rollout.build import build_controller
from moe_trm.rollout.controller import RolloutController
from moe_trm.rollout.keeper import Keeper
from moe_trm.types import TrainBatch
from tests.integration.test_rollout_server import make_push

RECOVERY_S = 60.0
GROUPS, GROUP_SIZE = 12, 8


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
    async def drill(keeper: Keeper) -> tuple[list[TrainBatch], float]:
        controller = await build_controller(config(brief_checkpoint, keeper.url), "key of the drill")
        try:
            await controller.load_weights(make_push(tmp_path, brief_checkpoint, 0, "bfloat16"))
            planning = asyncio.ensure_future(controller.plan(1, data_size=1))
            await until_busy(controller)
            os.killpg(keeper.server.process.pid, fault)
            started = time.monotonic()
            while not controller._engine.metrics()["rollout/recoveries"]:
                await asyncio.sleep(0.1)
                assert time.monotonic() - started < 3 * RECOVERY_S
            seconds = time.monotonic() - started
            [first] = await planning
            await controller.load_weights(make_push(tmp_path, brief_checkpoint, 1, "bfloat16"))
            [second] = await controller.plan(2, data_size=1)
            return [first, second], seconds
        finally:
            await controller.close()

    with Keeper(config(brief_checkpoint), tmp_path / "rollout.log", "key of the drill") as keeper:
        batches, seconds = asyncio.run(drill(keeper))
        restarts = keeper.restarts
    print(f"{fault.name}: back and proved after {seconds:.1f} s")
    assert seconds < RECOVERY_S
    assert restarts == 1
    trained = [sample for batch in batches for sample in sample_ids(batch)]
    metrics = batches[-1].metrics
    assert metrics["rollout/reissued"] > 0
    assert len(trained) == len(set(trained)) == metrics["ledger/trained"]
    for batch in batches:
        places = ("queued", "in_flight", "trained", "rejected", "dropped")
        assert batch.metrics["ledger/issued"] == sum(batch.metrics[f"ledger/{place}"] for place in places)
    assert metrics["ledger/trained"] + metrics["ledger/rejected"] == 2 * GROUPS * GROUP_SIZE
    assert metrics["ledger/dropped"] == 0


async def until_busy(controller: RolloutController) -> None:
    """Some samples of the batch are done, others are being made."""
    while controller._ledger.queued == 0:
        await asyncio.sleep(0.01)
    assert controller._ledger.in_flight > 0


def sample_ids(batch: TrainBatch) -> list[int]:
    return [row.record.sample_id for mini in batch.mini_batches for micro in mini.micro_batches for row in micro.rows]
