"""Sessions of several rows on their way to the learner: one step, its recording, and a bad row among good ones."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moe_trm.config.schema import Config
from moe_trm.config.schema.agent import AgentRows
from moe_trm.errors import RecordRejected
from moe_trm.rollout.controller import RolloutController
from moe_trm.rollout.recorded import BundleEngine, RecordedSampler
from moe_trm.runtime import wire
from moe_trm.sync.manifest import WeightPush
from moe_trm.types import RolloutRecord, SampledTurn, SamplingParams, TrainBatch, TrainRow
from tests.unit.advantages import of_step
from tests.unit.recording.test_bundle import assert_same
from tests.unit.rollout.agents.speaking_engine import SpeakingEngine
from tests.unit.rollout.agents.test_agent_sampler import PARAMS, TOKENS, MoodTask, sampler, speak
from tests.unit.rollout.moods import prompt

AGENT = """
import asyncio
import aiohttp

async def run(base_url, api_key, prompt):
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {api_key}"}) as client:
        async def say(history, word=None):
            history = [*history, *([{"role": "user", "content": word}] if word else [])]
            body = {"model": "policy", "messages": history}
            async with client.post(f"{base_url}/chat/completions", json=body) as response:
                answer = await response.json()
                assert response.status == 200, answer
                return [*history, answer["choices"][0]["message"]]

        history = await say(list(prompt.messages))
        if prompt.extra["mood"] == "alone":
            return 0.0
        # Sub-agents at work on the first answer; then the main agent goes on with what one of them found.
        one, other = await say(history, "part one"), await say(history, "part two")
        await say(other, "and then?")
        return 1.0 if prompt.extra["mood"] == "right" else 0.25
"""
MOODS = ("right", "alone")
ROWS: tuple[AgentRows, ...] = ("last", "trajectory", "turns")


def config(**changes: object) -> Config:
    return Config.model_validate(
        {
            "model": {"checkpoint": "unused"},
            "rollout": {"prompts_per_step": 2, "group_size": 2},
            "advantage": {"name": "reinforce_plus_plus"},
            "learner": {"minibatches": 1, "micro_batch_rows": 3},
            **changes,
        }
    )


class MixedTask(MoodTask):
    """Two prompts: sessions of four answers, and of one."""

    def __init__(self) -> None:
        super().__init__(MOODS)


async def live(folder: Path, rows: AgentRows, settings: Config, data_size: int = 1) -> list[TrainBatch]:
    engine, task = SpeakingEngine(speak), MixedTask()
    made = sampler(folder, engine, task, rows=rows, agent=AGENT)
    await made.start()
    controller = RolloutController(settings, engine, task, PARAMS, made)
    try:
        await controller.load_weights(WeightPush(0, "", ()))
        return await controller.plan(1, data_size=data_size)
    finally:
        await controller.close()


def rows_of(batches: Sequence[TrainBatch]) -> list[TrainRow]:
    found = [
        row for batch in batches for mini in batch.mini_batches for micro in mini.micro_batches for row in micro.rows
    ]
    return sorted(found, key=lambda row: (row.record.sample_id, row.record.row))


@pytest.mark.parametrize("rows", ROWS)
def test_one_step_and_its_repetition_from_the_recording(rows: AgentRows, tmp_path: Path) -> None:
    settings = config(record={"bundle": str(tmp_path / "bundle")})
    batches = asyncio.run(live(tmp_path, rows, settings, data_size=2))
    found = rows_of(batches)
    own = Counter(row.record.sample_id for row in found)
    expected = {"last": [1, 1, 1, 1], "trajectory": [2, 2, 1, 1], "turns": [4, 4, 1, 1]}[rows]
    assert [own[number] for number in range(4)] == expected
    lengths = {number: sum(r.record.num_sampled for r in found if r.record.sample_id == number) for number in own}
    answer, metrics = len(speak(())) - 1, batches[0].metrics  # digits of a longer context come on top
    assert metrics["response/length_mean"] == sum(lengths.values()) / 4
    assert metrics["ledger/trained"] == 4
    assert (metrics["agent/left_out_tokens"] > 2 * answer) == (rows == "last")
    # The baseline is of the batch, over samples weighed by all their tokens.
    advantages = of_step(batches, settings)
    rewards = {0: 1.0, 1: 1.0, 2: 0.0, 3: 0.0}
    tokens = np.array([lengths[number] for number in range(4)])
    mean = sum(rewards[n] * lengths[n] for n in range(4)) / tokens.sum()
    std = np.sqrt(sum(lengths[n] * (rewards[n] - mean) ** 2 for n in range(4)) / (tokens.sum() - 1))
    for row in found:
        number = row.record.sample_id
        assert row.record.reward == rewards[number]
        np.testing.assert_allclose(advantages[row.record.row_id], (rewards[number] - mean) / std, rtol=1e-6)
        assert row.sample_tokens == (lengths[number] if own[number] > 1 else None)
        assert {turn.row for turn in row.record.session} - {-1} == set(range(own[number]))
        assert row.record.routes is not None
        row.record.routes.check_tokens(row.record.tokens, row.record.origin)
    assert {mini.num_sequences for batch in batches for mini in batch.mini_batches} == {4}
    received = wire.decode([bytes(frame) for frame in wire.encode(batches[0])], TrainBatch)
    assert_same(received, batches[0])

    async def again() -> list[TrainBatch]:
        engine, task = (
            BundleEngine(str(tmp_path / "bundle"), prompts_own=True, several_rows=rows != "last"),
            MixedTask(),
        )
        await engine.start()
        controller = RolloutController(config(), engine, task, PARAMS, RecordedSampler(engine, task, PARAMS))
        await controller.load_weights(WeightPush(0, "", ()))
        return await controller.plan(1, data_size=2)

    for one, two in zip(found, rows_of(asyncio.run(again())), strict=True):
        assert_same(one, two)


def test_shuffled_rewards_stay_those_of_whole_samples(tmp_path: Path) -> None:
    found = rows_of(asyncio.run(live(tmp_path, "turns", config(task={"shuffle_rewards": True}))))
    by_sample = {row.record.sample_id: row.record.reward for row in found}
    assert sorted(reward for reward in by_sample.values() if reward is not None) == [0.0, 0.0, 1.0, 1.0]
    assert all(row.record.reward == by_sample[row.record.sample_id] for row in found)


class Aging(SpeakingEngine):
    """Answers of one version for each step, however early they are sampled: ten, one group after the other."""

    async def turn(
        self, context: Sequence[int], params: SamplingParams, *, start: int = 0, bare: bool = False
    ) -> SampledTurn:
        self.version = len(self.asked) // 10
        return await super().turn(context, params, start=start, bare=bare)

    async def load_weights(self, push: WeightPush) -> None: ...


@pytest.mark.parametrize("rows", ["trajectory", "turns"])
def test_a_group_that_is_trained_again_brings_every_row_with_the_weight_of_its_draw(
    rows: AgentRows, tmp_path: Path
) -> None:
    """Beside new samples, on two ranks: rows, baselines and books of whole samples, each at most twice."""
    pipeline = {"mode": "async", "max_staleness": 3, "reuse_groups": 1, "max_uses": 2, "reuse_tau": 1.0}
    rollout = {"prompts_per_step": 2, "group_size": 2, "concurrency": 1}
    settings = config(pipeline=pipeline, rollout=rollout, train={"steps": 4})

    async def go() -> list[list[TrainBatch]]:
        engine, task = Aging(speak), MixedTask()
        made = sampler(tmp_path, engine, task, rows=rows, agent=AGENT)
        await made.start()
        controller, steps = RolloutController(settings, engine, task, PARAMS, made), []
        try:
            for step in range(1, 5):
                await controller.load_weights(WeightPush(step - 1, "", ()))
                steps.append(await controller.plan(step, data_size=2))
            return steps
        finally:
            await controller.close()

    first: dict[int, list[TrainRow]] = {}
    uses: Counter[int] = Counter()
    for step, batches in enumerate(asyncio.run(asyncio.wait_for(go(), 300)), 1):
        found: dict[int, list[TrainRow]] = {}
        for row in rows_of(batches):
            found.setdefault(row.record.sample_id, []).append(row)
        again = {number: own for number, own in found.items() if number in first}
        assert len({own[0].record.group_id for own in again.values()}) == (step > 1)
        assert len(found) - len(again) == 4
        assert len(again) == (2 if step > 1 else 0)
        rewards = np.array([own[0].record.reward for own in found.values()], np.float64)
        tokens = np.array([sum(row.record.num_sampled for row in own) for own in found.values()])
        mean = (rewards * tokens).sum() / tokens.sum()
        std = np.sqrt((tokens * (rewards - mean) ** 2).sum() / (tokens.sum() - 1))
        metrics, advantages = batches[0].metrics, of_step(batches, settings)
        for number, own in found.items():
            uses[number] += 1
            assert [row.record.row for row in own] == list(range(len(own)))
            assert {row.weight for row in own} == {metrics["reuse/weight_max"] if number in again else 1.0}
            for row in own:
                value = (own[0].record.reward - mean) / std
                np.testing.assert_allclose(advantages[row.record.row_id], value, rtol=1e-6)
            for row, before in zip(own, first.get(number, own), strict=True):
                assert_same(row.record, before.record)
                assert row.sample_tokens == before.sample_tokens
        assert {mini.num_sequences for batch in batches for mini in batch.mini_batches} == {len(found)}
        assert metrics["ledger/trained"] == 4 * step
        assert metrics["ledger/reused"] == 2 * (step - 1)
        first |= {number: own for number, own in found.items() if number not in again}
    assert max(uses.values()) == 2
    assert max(len(first[number]) for number in uses if uses[number] == 2) > 1, "no sample of several rows came again"


class Changing(SpeakingEngine):
    """Weights change while the answer number `bad` is sampled: the routes before are those of other weights."""

    def __init__(self, bad: int) -> None:
        super().__init__(speak)
        self.bad = bad

    async def turn(
        self, context: Sequence[int], params: SamplingParams, *, start: int = 0, bare: bool = False
    ) -> SampledTurn:
        number = len(self.asked)
        turn = await super().turn(context, params, start=start, bare=bare)
        if number != self.bad:
            return turn
        return replace(turn, recomputed=1, versions=np.array([0, *[1] * (turn.num_sampled - 1)], np.int32))


def made(folder: Path, rows: AgentRows, bad: int) -> tuple[RolloutRecord | str, dict[str, float]]:
    async def go() -> tuple[RolloutRecord | str, dict[str, float]]:
        maker = sampler(folder, Changing(bad), MixedTask(), rows=rows, agent=AGENT)
        await maker.start()
        try:
            return await maker.sample(prompt("right"), sample_id=3, group_id=1), maker.metrics()
        except RecordRejected as rejection:
            return rejection.reason, maker.metrics()
        finally:
            await maker.close()

    return asyncio.run(asyncio.wait_for(go(), 300))


@pytest.mark.parametrize(
    ("rows", "bad", "trained", "rejected"),
    [
        # Answers: 0, then 1 and 2 behind it, then 3 behind 2.
        ("last", 1, [[0, 2, 3]], 0),
        ("last", 3, "version_span", 0),
        ("trajectory", 1, [[0, 2, 3]], 1),
        ("trajectory", 3, [[0, 1]], 1),
        ("turns", 3, [[0], [1], [2]], 1),
        ("turns", 2, [[0], [1]], 2),
        ("turns", 0, "version_span", 0),
    ],
)
def test_a_bad_row_costs_itself_and_the_books_say_so(
    rows: AgentRows, bad: int, trained: list[list[int]] | str, rejected: int, tmp_path: Path
) -> None:
    found, metrics = made(tmp_path, rows, bad)
    if isinstance(trained, str):
        assert found == trained
        assert metrics["agent/rows"] == metrics["agent/left_out_tokens"] == 0
        return
    assert isinstance(found, RolloutRecord)
    own = [[answer for answer, turn in enumerate(found.session) if turn.row == row.row] for row in found.rows]
    assert own == trained
    assert all(row.reward == 1.0 for row in found.rows)
    assert metrics["agent/rows"] == len(trained)
    assert metrics.get("agent/rejected_rows/version_span", 0) == rejected
    left = [turn for turn in found.session if turn.row < 0]
    assert metrics["agent/left_out_tokens"] == sum(turn.sampled for turn in left)
    expected = {"not_chosen"} if rows == "last" else {"version_span"}
    assert {turn.reason for turn in left} == expected


def test_an_evaluation_takes_the_last_branch_and_counts_nothing(tmp_path: Path) -> None:
    async def go() -> tuple[RolloutRecord, dict[str, float]]:
        maker = sampler(tmp_path, SpeakingEngine(speak), MixedTask(), rows="turns", agent=AGENT)
        await maker.start()
        try:
            return await maker.answer(prompt("right"), PARAMS), maker.metrics()
        finally:
            await maker.close()

    record, metrics = asyncio.run(asyncio.wait_for(go(), 300))
    assert (record.further, record.turn_ids.max(), record.reward) == ((), 2, 1.0)
    assert not any(metrics.values())
    assert TOKENS.decode_all(record.tokens.tolist()).count("part two") == 1
