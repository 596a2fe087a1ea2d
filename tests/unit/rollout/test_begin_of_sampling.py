"""The moment at which the samples of a step are asked for."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from moe_trm.config.schema import Config
from moe_trm.sync.manifest import WeightPush
from moe_trm.types import Prompt, RolloutRecord, SamplingParams, TrainBatch
from tests.unit.rollout.fake_engine import CONFIG, FakeEngine, controller_with, rows_of

SAMPLES = CONFIG.rollout.prompts_per_step * CONFIG.rollout.group_size
STEPS = 3
ROUNDS = 100
"""Of the event loop: more than it takes to ask for a step."""


class AskedEngine(FakeEngine):
    """Remembers the samples that it was asked for, and the version it had then."""

    def __init__(self, reject: frozenset[int] = frozenset()) -> None:
        super().__init__(reject)
        self.asked = list[tuple[int, int]]()

    async def generate(self, prompt: Prompt, params: SamplingParams, *, sample_id: int, group_id: int) -> RolloutRecord:
        self.asked.append((self.version, sample_id))
        return await super().generate(prompt, params, sample_id=sample_id, group_id=group_id)


def run(engine: AskedEngine, settings: dict[str, Any]) -> tuple[list[int], list[list[TrainBatch]]]:
    """Samples asked for after each push and before the next step asks; the batches."""
    config = Config.model_validate(CONFIG.model_dump() | {"train": {"steps": STEPS}} | settings)

    async def go() -> tuple[list[int], list[list[TrainBatch]]]:
        controller, early, batches = controller_with(engine, config), list[int](), list[list[TrainBatch]]()
        for step in range(STEPS + 1):
            before = len(engine.asked)
            await controller.load_weights(WeightPush(step, "", ()))
            for _ in range(ROUNDS):
                await asyncio.sleep(0)
            early.append(len(engine.asked) - before)
            if step < STEPS:
                batches.append(await controller.plan(step + 1, data_size=2))
        await controller.close()
        return early, batches

    return asyncio.run(go())


@pytest.mark.parametrize(
    ("settings", "early"),
    [
        ({}, [0, SAMPLES, SAMPLES, 0]),
        ({"train": {"steps": 3, "eval_every": 2}}, [0, SAMPLES, 0, 0]),
        ({"checkpoint": {"every": 1}}, [0, 0, 0, 0]),
        ({"checkpoint": {"every": 0}}, [0, SAMPLES, SAMPLES, 0]),
    ],
    ids=["neither", "evaluates", "saves", "saves never"],
)
def test_sampling_begins_with_the_push_unless_the_run_evaluates_or_saves_first(
    settings: dict[str, Any], early: list[int]
) -> None:
    engine = AskedEngine()
    asked, batches = run(engine, settings)
    assert asked == early
    for step, shares in enumerate(batches, 1):
        records = [row.record for row in rows_of(shares)]
        assert {version for record in records for version in record.versions.tolist()} == {step - 1}
        assert sorted(sample for version, sample in engine.asked if version == step - 1) == list(
            range((step - 1) * SAMPLES, step * SAMPLES)
        )
        metrics = shares[0].metrics
        assert metrics["ledger/issued"] == step * SAMPLES
        assert metrics["ledger/queued"] == metrics["ledger/in_flight"] == metrics["queue/groups"] == 0


def test_early_samples_that_are_rejected_are_counted_in_their_step() -> None:
    _, batches = run(AskedEngine(frozenset({1, SAMPLES + 2, SAMPLES + 3})), {})
    assert [shares[0].metrics["records/rejected/route_rows"] for shares in batches] == [1, 3, 3]
