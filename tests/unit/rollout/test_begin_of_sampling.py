"""The moment at which the samples of a step are asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from moe_trm.config.engines import EngineTraits
from moe_trm.config.schema import Config
from moe_trm.errors import SyncError
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


class WaitingEngine(AskedEngine):
    """Keeps samples that are asked for too early until it has their weights."""

    traits = EngineTraits(awaits_weights=True)

    def __init__(self) -> None:
        super().__init__()
        self.expected, self.before, self.loaded = 0, list[int](), asyncio.Event()

    def expect(self, version: int) -> None:
        self.expected = version
        self.loaded.clear()

    async def generate(self, prompt: Prompt, params: SamplingParams, *, sample_id: int, group_id: int) -> RolloutRecord:
        if not self.loaded.is_set():
            self.before.append(sample_id)
            await self.loaded.wait()
        return await super().generate(prompt, params, sample_id=sample_id, group_id=group_id)

    async def load_weights(self, push: WeightPush) -> None:
        for _ in range(ROUNDS):
            await asyncio.sleep(0)
        await super().load_weights(push)
        self.loaded.set()


@pytest.mark.parametrize(
    ("settings", "early"),
    [
        ({}, range(SAMPLES, 3 * SAMPLES)),
        ({"checkpoint": {"every": 1}}, ()),
        ({"pipeline": {"mode": "one_step"}}, ()),
    ],
    ids=["neither", "saves", "overlaps"],
)
def test_an_engine_that_awaits_weights_is_asked_before_it_has_them(
    settings: dict[str, Any], early: Sequence[int]
) -> None:
    """Only where the step surely comes next and nothing else is sampled; the samples are of the new weights."""
    engine = WaitingEngine()
    if "pipeline" in settings:
        engine.loaded.set()
    _, batches = run(engine, settings)
    assert engine.before == [*early]
    if "pipeline" not in settings:
        versions = [{v for row in rows_of(shares) for v in row.record.versions.tolist()} for shares in batches]
        assert versions == [{0}, {1}, {2}]


def test_a_refused_push_ends_the_run_with_its_reason_and_leaves_nothing_behind() -> None:
    class RefusingEngine(WaitingEngine):
        async def load_weights(self, push: WeightPush) -> None:
            raise SyncError("checksums differ")

    async def go() -> None:
        controller = controller_with(RefusingEngine())
        with pytest.raises(SyncError, match="checksums differ"):
            await controller.load_weights(WeightPush(1, "", ()))
        await controller.close()
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(go())
