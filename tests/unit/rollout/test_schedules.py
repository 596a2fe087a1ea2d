"""Schedules under random faults: no token beyond its bound, books that balance, repetition and resumption."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_trm.config.rules import refusals
from moe_trm.config.schema import Config
from moe_trm.types import TrainBatch
from tests.unit.rollout.simulated_fleet import Faults, RepeatingEngine, SimulatedFleet, Trained, ages, records, train
from tests.unit.virtual_time import run

STEPS = 8
PLACES = ("queued", "in_flight", "trained", "rejected", "dropped")


@st.composite
def pipelines(draw: st.DrawFn) -> dict[str, Any]:
    """Settings of a schedule that launch does not refuse."""
    mode, every = draw(st.sampled_from(["sync", "one_step", "async", "periodic"])), draw(st.integers(1, 3))
    found: dict[str, Any] = {"mode": mode, "push_every": every, "stream": draw(st.booleans())}
    if mode == "async":
        found["max_staleness"] = every - 1 + draw(st.integers(0, 3))
    found["rolling_push"] = draw(st.booleans())
    found["reuse_groups"], found["max_uses"] = draw(st.integers(0, 3)), draw(st.integers(2, 3))
    if found["reuse_groups"]:
        found["reuse_tau"] = draw(st.sampled_from([0.5, 2.0, 1e6]))
    return found


def config(pipeline: dict[str, Any], *, concurrency: int = 64, **batch: Any) -> Config:
    chosen = Config.model_validate(
        {
            "model": {"checkpoint": "unused"},
            "rollout": {"prompts_per_step": 4, "group_size": 2, "concurrency": concurrency},
            "learner": {"minibatches": 2, "micro_batch_rows": 3},
            "pipeline": pipeline,
            "batch": batch,
            "train": {"steps": STEPS},
        }
    )
    if any(problem.key == "pipeline.reuse_groups" for problem in refusals(chosen)):
        chosen = chosen.model_copy(update={"pipeline": chosen.pipeline.model_copy(update={"reuse_groups": 0})})
    assert [problem for problem in refusals(chosen) if problem.key.startswith("pipeline.")] == []
    return chosen


def content(trained: Trained, first: int = 1) -> list[Any]:
    """Everything of the steps from `first` on but when it happened."""
    return [content_of(batch) for batch in trained.steps if batch.step >= first]


def content_of(batch: TrainBatch) -> Any:
    timed = ("time/", "rollout/tokens_per_s", "ledger/", "queue/", "records/")
    rows = [
        [[(row.record.sample_id, row.weight) for row in micro.rows] for micro in mini.micro_batches]
        for mini in batch.mini_batches
    ]
    return rows, batch.compared, {name: value for name, value in batch.metrics.items() if not name.startswith(timed)}


def balanced(batch: TrainBatch) -> None:
    """Every sample that was asked for is in one place of the books."""
    assert batch.metrics["ledger/issued"] == sum(batch.metrics[f"ledger/{place}"] for place in PLACES)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    pipeline=pipelines(),
    servers=st.integers(1, 3),
    interrupt=st.booleans(),
    dies=st.sampled_from([0.0, 0.3]),
    refused=st.sampled_from([0.0, 0.1]),
    slowest_s=st.sampled_from([0.05, 1.0, 20.0]),
    drop=st.booleans(),
    concurrency=st.sampled_from([2, 5, 64]),
    train_s=st.lists(st.floats(0.0, 3.0), min_size=STEPS, max_size=STEPS),
)
def test_bounds_hold_and_books_balance_whatever_goes_wrong(
    seed: int,
    pipeline: dict[str, Any],
    servers: int,
    interrupt: bool,
    dies: float,
    refused: float,
    slowest_s: float,
    drop: bool,
    concurrency: int,
    train_s: list[float],
) -> None:
    chosen = config(pipeline, concurrency=concurrency, zero_variance="drop" if drop else "keep", refill_limit=100.0)
    bound, every = chosen.pipeline.staleness_limit, chosen.pipeline.push_every
    engine = SimulatedFleet(
        servers,
        rolling=chosen.pipeline.rolling_push,
        interrupt=(interrupts := interrupt and not chosen.pipeline.rolling_push),
        push_s=0.2,
        faults=Faults(dies, refused, slowest_s),
        chance=random.Random(seed),
    )
    trained = run(train(chosen, engine, train_s))
    uses: Counter[int] = Counter()
    last_new = -1
    for batch in trained.steps:
        assert ages(batch).min() >= 0
        assert ages(batch).max() <= bound
        assert batch.metrics["rollout/age_max"] == ages(batch).max()
        new = sorted({record.group_id for record in records(batch) if not uses[record.sample_id]})
        assert all(group > last_new for group in new), "groups are trained in the order of issue"
        last_new = max([last_new, *new])
        for record in records(batch):
            uses[record.sample_id] += 1
            if not interrupts:
                assert len(set(record.versions.tolist())) == 1, "a sample ends under the weights that began it"
            assert not (record.versions % every).any(), "only what was pushed samples"
        shares = [batch.metrics[f"rollout/age_share/{age}"] for age in range(bound + 1)]
        assert sum(shares) == pytest.approx(1)
        balanced(batch)
        assert batch.metrics["ledger/trained"] == len(uses)
        assert batch.metrics.get("ledger/reused", 0) == uses.total() - len(uses)
    assert bound or trained.steps[-1].metrics["rollout/stale_tokens"] == 0
    assert max(uses.values()) <= (chosen.pipeline.max_uses if chosen.pipeline.reuse_groups else 1)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    pipeline=pipelines(),
    refused=st.sampled_from([0.0, 0.1]),
    stop_after=st.integers(1, STEPS - 1),
)
def test_a_recording_repeats_whenever_its_answers_come_and_wherever_it_is_resumed(
    seed: int, pipeline: dict[str, Any], refused: float, stop_after: int
) -> None:
    chosen, seconds = config(pipeline), [1.0] * STEPS
    live = SimulatedFleet(2, rolling=True, faults=Faults(0.1, refused, 2.0), chance=random.Random(seed))
    first = run(train(chosen, live, seconds))

    def again(number: int, stop_after: int | None = None) -> Trained:
        engine = RepeatingEngine(live.answers, random.Random(number))
        return run(train(chosen, engine, [0.3 * number] * STEPS, stop_after=stop_after))

    assert content(first) == content(again(1)) == content(again(7))
    resumed = again(1, stop_after)
    assert content(resumed, stop_after + 1) == content(first, stop_after + 1)
    balanced(resumed.steps[-1])


def test_one_step_trains_what_the_version_before_sampled() -> None:
    trained = run(train(config({"mode": "one_step"}), SimulatedFleet(1), [1.0] * STEPS))
    assert [batch.versions for batch in trained.steps] == [(0,), *((version,) for version in range(STEPS - 1))]


def test_parts_of_a_step_are_its_groups_in_the_order_of_issue() -> None:
    chosen = config({"mode": "sync", "stream": True}, refill_limit=1)
    engine = SimulatedFleet(1, lengths=lambda sample_id: 1 + 7 * (sample_id % 8 >= 4))
    trained = run(train(chosen, engine, [4.0] * STEPS))
    for parts in trained.parts:
        step = parts[0].step
        halves = [{4 * step - 4, 4 * step - 3}, {4 * step - 2, 4 * step - 1}]
        for part, half in zip(parts, halves, strict=True):
            assert {record.group_id for record in records(part)} <= half
            assert bool(part.mini_batches) is bool(records(part))
        assert [bool(part.metrics) for part in parts] == [False, True]
    # The first half, of one second, trains for two while the second half is sampled for eight: 8 + 2 a step, not 12.
    assert trained.ends_s[0] == 10
    whole = run(
        train(config({"mode": "sync"}, refill_limit=1), SimulatedFleet(1, lengths=engine._lengths), [4.0] * STEPS)
    )
    assert whole.ends_s[0] == 12


def test_with_rolling_pushes_two_versions_are_served_side_by_side() -> None:
    """While the first server drains its long answer, the others begin new ones under the version before."""
    chosen = config({"mode": "async", "max_staleness": 2, "rolling_push": True}, concurrency=6)
    engine = SimulatedFleet(3, rolling=True, push_s=1.0, lengths=lambda sample_id: 1 + sample_id % 4 * 3)
    trained = run(train(chosen, engine, [1.0] * STEPS))
    assert engine.side_by_side == 2
    assert any(len(batch.versions) > 1 for batch in trained.steps)
    assert max(int(ages(batch).max()) for batch in trained.steps) <= 2


def test_by_default_nothing_is_used_again() -> None:
    trained = run(train(config({}), SimulatedFleet(1), [1.0] * STEPS))
    for batch in trained.steps:
        assert not [name for name in batch.metrics if name.startswith("reuse/") or name == "ledger/reused"]
        assert {row.weight for mini in batch.mini_batches for micro in mini.micro_batches for row in micro.rows} == {1}
