"""Groups that are trained again: the draw, its weights, and the buffer's bounds."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_trm.config.schema import BatchConfig, PipelineConfig
from moe_trm.errors import RecordRejected
from moe_trm.rollout.producer import Producer
from moe_trm.rollout.store.ledger import Ledger
from moe_trm.rollout.store.reuse import (
    LEAST,
    Again,
    ReuseBuffer,
    chances,
    drawn,
    freshness,
    importance,
    spread,
    with_weights,
)
from moe_trm.rollout.store.store import Group, GroupStore
from moe_trm.types import Prompt, RolloutRecord, SamplingParams, TrainRow
from tests.unit.records import make_record

Ages = st.lists(st.integers(0, 6), min_size=1, max_size=12)


def test_of_old_items_alone_the_youngest_does_not_vanish() -> None:
    np.testing.assert_allclose(freshness(np.array([2000.0, 2001.0]), 1.0), [1.0, math.exp(-1.0)])


def test_chances_by_hand() -> None:
    """Of ages 0, 1, 1 with tau = 1 / ln 2: priorities 1, 1/2, 1/2. Of two drawn the youngest is certain."""
    priorities = freshness(np.array([0.0, 1.0, 1.0]), 1 / math.log(2))
    assert priorities.tolist() == pytest.approx([1, 0.5, 0.5])
    assert chances(priorities, 1).tolist() == pytest.approx([0.5, 0.25, 0.25])
    assert chances(priorities, 2).tolist() == pytest.approx([1, 0.5, 0.5])
    assert chances(np.array([8.0, 1.0, 1.0]), 2).tolist() == pytest.approx([1, 0.5, 0.5])
    assert chances(priorities, 5).tolist() == [1, 1, 1]
    odds = chances(priorities, 1)
    assert importance(odds, 1, 1.0).tolist() == pytest.approx([2 / 3, 4 / 3, 4 / 3])
    assert importance(odds, 1, 0.5).tolist() == pytest.approx([math.sqrt(2 / 3), *[math.sqrt(4 / 3)] * 2])
    assert importance(odds, 1, 0.0).tolist() == [1, 1, 1]


def test_groups_whose_rewards_differ_are_drawn_more_often_and_count_less() -> None:
    """Four groups of one age: the spread of the first is 0.5, of the others 0."""
    assert spread([1.0, 0.0]) == pytest.approx(0.5 + LEAST)
    times, weights = np.zeros(4), dict[int, float]()
    for seed in range(400):
        held = buffer(Ledger(), seed=seed, reuse_groups=1, reuse_priority="spread")
        given = [group(number, 0) for number in range(4)]
        one, two = given[0].kept
        given[0] = replace(given[0], kept=(replace(one, reward=1.0), replace(two, reward=0.0)))
        held.keep(given)
        [again] = held.draw(1, 1)
        times[again.group.group_id] += 1
        weights[again.group.group_id] = again.weight
    chance = (0.5 + LEAST) / (0.5 + 4 * LEAST)
    assert times[0] / 400 == pytest.approx(chance, abs=0.08)
    assert min(times) > 0, "equal rewards may be drawn too"
    assert weights[0] == pytest.approx(0.25 / chance)


@settings(max_examples=60)
@given(Ages, st.integers(1, 8), st.sampled_from([0.3, 1.0, 5.0, 1e6]))
def test_a_draw_has_its_size_its_chances_and_an_even_expectation(ages: list[int], count: int, tau: float) -> None:
    """Over a grid of starts, against counting. The weighted sum of any values is that of an even draw."""
    count = min(count, len(ages))
    odds = chances(freshness(np.array(ages, np.float64), tau), count)
    assert odds.sum() == pytest.approx(count)
    assert odds.max() <= 1
    starts = (np.arange(2000) + 0.5) / 2000
    times, values = np.zeros(len(ages)), np.arange(1.0, len(ages) + 1) ** 2
    weights, total = importance(odds, count, 1.0), 0.0
    for start in starts:
        places = drawn(odds, float(start))
        assert len(places) == len(set(places)) == count
        times[places] += 1
        total += float((weights * values)[places].sum())
    assert times / len(starts) == pytest.approx(odds, abs=2e-3)
    largest = float((weights * values).max())
    assert total / len(starts) == pytest.approx(count * values.mean(), abs=3e-3 * len(ages) * largest)
    younger = np.subtract.outer(np.array(ages), np.array(ages)) < 0
    assert (np.subtract.outer(odds, odds)[younger] >= -1e-12).all()


def group(group_id: int, version: int, size: int = 2) -> Group:
    records = tuple(make_record(sample_id=10 * group_id + i, group_id=group_id, version=version) for i in range(size))
    return Group(group_id, records, records)


def buffer(ledger: Ledger, *, seed: int = 0, **changes: object) -> ReuseBuffer:
    given = {"mode": "async", "max_staleness": 3, "reuse_groups": 2, "max_uses": 3, **changes}
    return ReuseBuffer(PipelineConfig.model_validate(given), ledger, seed=seed)


def test_younger_groups_are_drawn_more_often() -> None:
    """Ages 2 and 0 at tau = 1: the older one in one of 1 + e^2 draws."""
    older = 0
    for seed in range(400):
        held = buffer(Ledger(), seed=seed, reuse_groups=1, reuse_tau=1.0)
        held.keep([group(0, 1), group(1, 3)])
        older += held.draw(4, 3)[0].group.group_id == 0
    assert older / 400 == pytest.approx(1 / (1 + math.exp(2)), abs=0.05)


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=12),
    st.integers(1, 4),
    st.integers(2, 4),
    st.integers(0, 4),
    st.integers(0, 2**31),
)
def test_nothing_is_used_too_often_or_too_old(lags: list[int], asked: int, uses: int, bound: int, seed: int) -> None:
    """One group a step, sampled `lag` versions before; the same buffer gives the same draws."""
    ledger, counts = Ledger(), dict[int, int]()
    settings_of = PipelineConfig(mode="async", max_staleness=bound, reuse_groups=asked, max_uses=uses)
    held, twin = ReuseBuffer(settings_of, ledger, seed), ReuseBuffer(settings_of, Ledger(), seed)
    for step, lag in enumerate(lags, 1):
        version = step - 1
        again = held.draw(step, version)
        assert [one.group.group_id for one in again] == sorted({one.group.group_id for one in again})
        assert [(one.group.group_id, one.weight) for one in again] == [
            (one.group.group_id, one.weight) for one in twin.draw(step, version)
        ]
        for one in again:
            assert version - one.group.oldest_version <= bound
            assert one.weight > 0
            counts[one.group.group_id] += 1
        assert len(again) <= asked
        new = group(step, max(0, version - lag))
        counts[step] = 1
        held.keep([new])
        twin.keep([new])
    assert max(counts.values()) <= uses
    assert ledger.reused == 2 * sum(count - 1 for count in counts.values())
    assert held.metrics()["ledger/reused"] == ledger.reused


def test_a_restored_buffer_draws_the_same() -> None:
    one, two = buffer(Ledger()), buffer(Ledger())
    groups = {number: group(number, number // 2) for number in range(6)}
    one.keep([*groups.values()])
    one.draw(3, 2)
    two.restore(one.state())
    assert two.missing.keys() <= groups.keys()
    for number in two.missing:
        two.put_back(groups[number])
    assert not two.missing
    for step in (4, 5, 6):
        assert [(a.group.group_id, a.weight) for a in one.draw(step, step - 1)] == [
            (a.group.group_id, a.weight) for a in two.draw(step, step - 1)
        ]
    assert one.state() == two.state()


def test_a_sample_is_as_old_as_the_oldest_of_its_rows() -> None:
    young, old = (make_record(sample_id=1, group_id=1, version=version) for version in (3, 0))
    sample, held = replace(young, further=(replace(old, row=1),)), buffer(Ledger())
    held.keep([Group(1, (sample,), (sample,))])
    assert [one.group.group_id for one in held.draw(4, 3)] == [1]
    assert held.draw(5, 4) == []


def test_without_the_setting_nothing_is_held() -> None:
    ledger = Ledger()
    off = ReuseBuffer(PipelineConfig(), ledger, seed=0)
    off.keep([group(1, 0)])
    assert off.draw(2, 0) == []
    assert off.metrics() == {}
    assert off.state() == []


def test_rows_of_drawn_groups_have_the_weight_of_the_draw() -> None:
    fresh, old = group(1, 0), group(2, 0)
    rows = [TrainRow(record) for record in (*fresh.kept, *old.kept)]
    assert [row.weight for row in with_weights(rows, [Again(old, 0.5)])] == [1, 1, 0.5, 0.5]


def test_a_group_that_is_made_again_is_the_group_that_was_trained() -> None:
    """With the same samples rejected, and the same left out by the filters."""

    class Answering:
        async def sample(self, prompt: Prompt, *, sample_id: int, group_id: int) -> RolloutRecord:
            if sample_id % 4 == 1:
                raise RecordRejected("route_rows", "cut short")
            made = make_record(sample_id=sample_id, group_id=group_id, reward=float(sample_id % 2))
            return replace(made, finish_reason="length" if sample_id % 4 == 2 else "stop")

        async def close(self) -> None: ...

        def metrics(self) -> dict[str, float]:
            return {}

        async def answer(self, prompt: Prompt, params: SamplingParams) -> RolloutRecord:
            raise AssertionError

    async def go(overlong: Literal["keep", "drop"]) -> tuple[Group, Group]:
        ledger = Ledger()
        made = Producer(
            Answering(),
            lambda number: Prompt(f"prompt-{number}", (1,)),
            GroupStore(ledger),
            ledger,
            BatchConfig(overlong=overlong),
            batch_groups=1,
            group_size=4,
            concurrency=4,
        )
        made.admit_steps(1)
        [first] = await made.take(0)
        return first, await made.again(first.group_id)

    for overlong, left in (("drop", 2), ("keep", 3)):
        first, again = asyncio.run(go(overlong))  # type: ignore[arg-type]
        assert [one.sample_id for one in again.kept] == [one.sample_id for one in first.kept]
        assert len(again.kept) == left
        assert [getattr(one, "sample_id", one) for one in again.outcomes] == [0, "route_rows", 2, 3]
