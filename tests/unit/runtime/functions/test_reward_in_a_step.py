"""A training step whose reward function fails on most samples, in every possible way.

The failures are counted, the others train, and the books balance.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

from moe_trm.rollout.controller import RolloutController
from moe_trm.sync.manifest import WeightPush
from moe_trm.tasks import RewardInput
from moe_trm.tasks.reward_function import FunctionReward
from moe_trm.types import SamplingParams
from tests.unit.rollout.fake_engine import CONFIG, FakeEngine, FakeTask

SOURCE = """
import os, time
from moe_trm.tasks import RewardInput

calls = 0

def reward(sample: RewardInput):
    global calls
    calls += 1
    match calls:
        case 1: raise KeyError("no such field")
        case 2: return {"right": float("nan")}
        case 3: return [1.0, 2.0]
        case 4: return "1.0"
        case 6: time.sleep(1000)
    return {"right": 1.0, "length": len(sample.completion_ids)}
"""


class OwnTask(FakeTask):
    reward_weights: Mapping[str, float] = {"length": -0.5}

    def __init__(self, reward: FunctionReward) -> None:
        self.own = reward

    async def reward(self, sample: RewardInput) -> object:
        return await self.own(sample)

    async def close(self) -> None:
        await self.own.close()


def test_a_step_goes_on_without_the_samples_that_have_no_reward(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(SOURCE)
    config = CONFIG.model_copy(update={"batch": CONFIG.batch.model_copy(update={"refill_limit": 1.0})})

    async def go() -> Mapping[str, float]:
        task = OwnTask(FunctionReward(f"{path}:reward", timeout_s=0.5))
        controller = RolloutController(config, FakeEngine(), task, SamplingParams())
        try:
            await controller.load_weights(WeightPush(0, "", ()))
            [share] = await controller.plan(1, data_size=1)
        finally:
            await controller.close()
        return share.metrics

    metrics = asyncio.run(go())
    reasons = {key.rpartition("/")[2]: value for key, value in metrics.items() if key.startswith("records/rejected/")}
    # One process scores in turn; after the sixth call it begins again, and with it the count.
    assert reasons == {"reward_error": 3, "reward_nan": 3, "reward_type": 6, "reward_timeout": 2}
    places = ("queued", "in_flight", "trained", "rejected", "dropped")
    assert metrics["ledger/issued"] == sum(metrics[f"ledger/{place}"] for place in places) == 16
    assert metrics["ledger/trained"] == 16 - sum(reasons.values())
    assert metrics["reward/mean"] == 1.0 - 0.5 * metrics["reward/length/mean"]
