"""The controller in simulated time: no token is older than the bound, nothing is lost, and nobody waits for ever."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_trm.config.schema import Config
from moe_trm.errors import RecordRejected
from moe_trm.rollout.controller import RolloutController
from moe_trm.sync.manifest import WeightPush
from moe_trm.types import Prompt, RolloutRecord, SamplingParams, TrainBatch
from tests.unit.records import make_record
from tests.unit.rollout.fake_engine import FakeEngine, FakeTask
from tests.unit.virtual_time import run

STEPS = 6


@dataclass
class SimulatedEngine(FakeEngine):
    """Samples token by token; a push waits for what runs, or lets it go on under the new weights."""

    def __init__(self, chance: random.Random, *, interrupt: bool, reject: float, slowest: float) -> None:
        super().__init__()
        self._chance, self._interrupt, self._reject, self._slowest = chance, interrupt, reject, slowest
        self._running, self._updating, self._changed = 0, False, asyncio.Condition()

    async def generate(self, prompt: Prompt, params: SamplingParams, *, sample_id: int, group_id: int) -> RolloutRecord:
        num_sampled = self._chance.randint(1, 6)
        pace = self._chance.uniform(0.01, self._slowest) / num_sampled
        async with self._changed:
            await self._changed.wait_for(lambda: not self._updating)
            self._running += 1
        versions = []
        for _ in range(num_sampled):
            await asyncio.sleep(pace)
            versions.append(self.version)
        async with self._changed:
            self._running -= 1
            self._changed.notify_all()
        if self._chance.random() < self._reject:
            raise RecordRejected("route_rows", "cut short")
        record = make_record(sample_id=sample_id, group_id=group_id, num_sampled=num_sampled)
        return replace(record, versions=np.array(versions, np.int32), reward=None)

    async def load_weights(self, push: WeightPush) -> None:
        async with self._changed:
            self._updating = True
            if not self._interrupt:
                await self._changed.wait_for(lambda: not self._running)
            self.version, self._updating = push.version, False
            self._changed.notify_all()


def config(mode: str, eta: int | None, *, concurrency: int = 64, **batch: Any) -> Config:
    return Config.model_validate(
        {
            "model": {"checkpoint": "unused"},
            "rollout": {"prompts_per_step": 3, "group_size": 2, "concurrency": concurrency},
            "learner": {"minibatches": 2, "micro_batch_rows": 3},
            "pipeline": {"mode": mode, "max_staleness": eta},
            "batch": batch,
            "train": {"steps": STEPS},
        }
    )


async def train(settings: Config, engine: SimulatedEngine, train_s: Sequence[float]) -> list[TrainBatch]:
    """The learner's side: take a batch, train, push without waiting for the push before the last."""
    controller = RolloutController(settings, engine, FakeTask(), SamplingParams())
    await controller.load_weights(WeightPush(0, "", ()))
    batches, loading = [], asyncio.ensure_future(asyncio.sleep(0))
    for step in range(1, STEPS + 1):
        [batch] = await controller.plan(step, data_size=1)
        batches.append(batch)
        await asyncio.sleep(train_s[step - 1])
        await loading
        loading = asyncio.ensure_future(controller.load_weights(WeightPush(step, "", ())))
        if not controller.overlaps:
            await loading
    await loading
    await controller.close()
    return batches


def records(batch: TrainBatch) -> list[RolloutRecord]:
    return [row.record for mini in batch.mini_batches for micro in mini.micro_batches for row in micro.rows]


@settings(max_examples=120)
@given(
    seed=st.integers(0, 2**32),
    pipeline=st.sampled_from(
        [("sync", None), ("one_step", None), ("async", 0), ("async", 1), ("async", 2), ("async", 4)]
    ),
    interrupt=st.booleans(),
    reject=st.sampled_from([0.0, 0.1]),
    drop=st.booleans(),
    slowest=st.sampled_from([0.05, 1.0, 20.0]),
    concurrency=st.sampled_from([1, 5, 64]),
    train_s=st.lists(st.floats(0.0, 3.0), min_size=STEPS, max_size=STEPS),
)
def test_no_token_is_too_old_and_nobody_waits_for_ever(
    seed: int,
    pipeline: tuple[str, int | None],
    interrupt: bool,
    reject: float,
    drop: bool,
    slowest: float,
    concurrency: int,
    train_s: list[float],
) -> None:
    mode, eta = pipeline
    chosen = config(mode, eta, concurrency=concurrency, zero_variance="drop" if drop else "keep", refill_limit=100.0)
    engine = SimulatedEngine(random.Random(seed), interrupt=interrupt, reject=reject, slowest=slowest)
    batches = run(train(chosen, engine, train_s))
    trained: list[int] = []
    for step, batch in enumerate(batches, 1):
        ages = [step - 1 - int(record.versions.min()) for record in records(batch)]
        assert all(0 <= age <= chosen.pipeline.staleness_limit for age in ages)
        places = ("queued", "in_flight", "trained", "rejected", "dropped")
        assert batch.metrics["ledger/issued"] == sum(batch.metrics[f"ledger/{place}"] for place in places)
        assert batch.metrics["rollout/age_max"] == max(ages)
        shares = [batch.metrics[f"rollout/age_share/{age}"] for age in range(chosen.pipeline.staleness_limit + 1)]
        assert sum(shares) == pytest.approx(1)
        trained += [record.sample_id for record in records(batch)]
    assert len(trained) == len(set(trained)) == batches[-1].metrics["ledger/trained"]
    # Batches are taken in the order of issue: no answer waits because it was long.
    firsts = [min(record.group_id for record in records(batch)) for batch in batches]
    assert firsts == sorted(firsts)
    if mode == "sync":
        assert batches[-1].metrics["rollout/stale_tokens"] == 0


def test_one_step_trains_what_the_version_before_sampled() -> None:
    engine = SimulatedEngine(random.Random(0), interrupt=False, reject=0.0, slowest=0.1)
    batches = run(train(config("one_step", None), engine, [1.0] * STEPS))
    assert [batch.versions for batch in batches] == [(0,), (0,), (1,), (2,), (3,), (4,)]


@pytest.mark.parametrize(("mode", "expected"), [("sync", 2.0), ("async", 1.0)])
def test_overlap_takes_the_longer_of_both_instead_of_their_sum(
    mode: str, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sampling a batch takes 1 s here (one sample after the other), training 1 s."""

    async def timed() -> float:
        engine = SimulatedEngine(random.Random(0), interrupt=True, reject=0.0, slowest=0.1)
        monkeypatch.setattr(engine._chance, "uniform", lambda low, high: 1 / 6)
        start = asyncio.get_running_loop().time()
        await train(config(mode, None, concurrency=1), engine, [1.0] * STEPS)
        return asyncio.get_running_loop().time() - start

    # The first batch is waited for in either mode.
    assert run(timed()) == pytest.approx(expected * STEPS + (1 if mode == "async" else 0), rel=0.35)


def test_a_resumed_run_takes_the_same_groups_as_one_that_was_not_stopped() -> None:
    async def go(stop_after: int | None) -> list[list[int]]:
        taken: list[list[int]] = []
        state, ledger = None, None
        engine = SimulatedEngine(random.Random(1), interrupt=False, reject=0.0, slowest=0.5)
        controller = RolloutController(config("async", 2), engine, FakeTask(), SamplingParams())
        await controller.load_weights(WeightPush(0, "", ()))
        for step in range(1, STEPS + 1):
            [batch] = await controller.plan(step, data_size=1)
            taken.append(sorted({record.group_id for record in records(batch)}))
            ledger = batch.metrics
            await controller.load_weights(WeightPush(step, "", ()))
            if step == stop_after:
                state = controller.state()
                await controller.close()
                controller = RolloutController(config("async", 2), engine, FakeTask(), SamplingParams())
                controller.restore(state)
                await controller.load_weights(WeightPush(step, "", ()))
        await controller.close()
        assert ledger is not None
        assert ledger["ledger/issued"] == sum(
            ledger[f"ledger/{place}"] for place in ("queued", "in_flight", "trained", "rejected", "dropped")
        )
        return taken

    assert run(go(3)) == run(go(None))
