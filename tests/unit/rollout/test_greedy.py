"""The greedy answer beside a prompt's samples: asked for once, never trained, the baseline of ReMax."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from moe_trm.config.schema import AdvantageConfig, Config
from moe_trm.errors import BundleError, ControllerError, EngineError, RecordRejected
from moe_trm.recording.bundle import BundleReader, BundleWriter
from moe_trm.rollout.controller import RolloutController
from moe_trm.rollout.greedy import GreedyBaseline, RecordedBaseline
from moe_trm.rollout.recorded import BundleEngine
from moe_trm.rollout.sampler import SingleTurn
from moe_trm.sync.manifest import WeightPush
from moe_trm.types import Prompt, RolloutRecord, SamplingParams, TrainBatch
from tests.unit.advantages import of_step
from tests.unit.records import make_record
from tests.unit.rollout.fake_engine import CONFIG, FakeEngine, FakeTask, rows_of

BEHAVIOR = SamplingParams(temperature=0.7, top_p=0.9, top_k=50, min_p=0.1, max_new_tokens=9, stop_token_ids=(2,))
REMAX = CONFIG.model_copy(update={"advantage": AdvantageConfig(name="remax")})
GROUPS, SIZE = 4, 4


class Answering:
    """A sampler whose greedy answers have the reward of their prompt, after samples or before them."""

    def __init__(self, failing: dict[str, BaseException] | None = None, *, slow: bool = False) -> None:
        self.asked: list[tuple[str, SamplingParams]] = []
        self._failing, self._slow, self.closed = failing or {}, slow, False

    async def sample(self, prompt: Prompt, *, sample_id: int, group_id: int) -> RolloutRecord:
        await asyncio.sleep(0)
        if sample_id == 1:
            raise RecordRejected("route_rows", "payload cut short")
        return make_record(sample_id=sample_id, group_id=group_id, reward=float(sample_id % 3))

    async def answer(self, prompt: Prompt, params: SamplingParams) -> RolloutRecord:
        self.asked.append((prompt.prompt_id, params))
        await asyncio.sleep(0.01 if self._slow else 0)
        if prompt.prompt_id in self._failing:
            raise self._failing[prompt.prompt_id]
        return replace(make_record(num_sampled=7), reward=float(prompt.prompt_id))

    def metrics(self) -> dict[str, float]:
        return {"agent/calls": 3.0}

    async def close(self) -> None:
        self.closed = True


def group(sampler: GreedyBaseline, number: int, prompt: str) -> asyncio.Future[list[RolloutRecord | BaseException]]:
    """All samples of a group at once, as the producer makes them."""
    own = (sampler.sample(Prompt(prompt, (1,)), sample_id=number * SIZE + i, group_id=number) for i in range(SIZE))
    return asyncio.gather(*own, return_exceptions=True)


@pytest.mark.parametrize("slow", [False, True])
def test_one_greedy_answer_for_each_group_and_its_reward_in_every_sample(slow: bool) -> None:
    async def go() -> None:
        inner = Answering(slow=slow)
        sampler = GreedyBaseline(inner, BEHAVIOR, SIZE)
        first, second = await asyncio.gather(group(sampler, 0, "5"), group(sampler, 1, "0.5"))
        assert [type(found).__name__ for found in first].count("RecordRejected") == 1
        assert {found.baseline for found in first if isinstance(found, RolloutRecord)} == {5.0}
        assert {found.baseline for found in second if isinstance(found, RolloutRecord)} == {0.5}
        assert all(found.reward == found.sample_id % 3 for found in second if isinstance(found, RolloutRecord))
        greedy = SamplingParams(temperature=1.0, top_p=1.0, top_k=1, min_p=0.0, max_new_tokens=9, stop_token_ids=(2,))
        assert sorted(inner.asked, key=lambda asked: asked[0]) == [("0.5", greedy), ("5", greedy)]
        # The same prompt in a later group is asked about again: the weights are others by then.
        await group(sampler, 2, "5")
        assert len(inner.asked) == 3
        expected = {"greedy/answers": 3.0, "greedy/rejected": 0.0, "greedy/tokens": 21.0, "agent/calls": 3.0}
        assert sampler.metrics() == expected
        await sampler.close()
        assert inner.closed

    asyncio.run(go())


def test_a_rejected_greedy_answer_rejects_the_samples_of_its_prompt_alone() -> None:
    async def go() -> None:
        inner = Answering({"bad": RecordRejected("reward_error", "no number")})
        sampler = GreedyBaseline(inner, BEHAVIOR, SIZE)
        bad, good = await asyncio.gather(group(sampler, 1, "bad"), group(sampler, 2, "1"))
        assert [found.reason for found in bad if isinstance(found, RecordRejected)] == ["no_greedy_answer"] * SIZE
        assert "reward_error" in str(bad[0])
        assert all(isinstance(found, RolloutRecord) for found in good)
        assert sampler.metrics()["greedy/rejected"] == 1

    asyncio.run(go())


def test_an_engine_that_fails_on_the_greedy_answer_stops_the_samples() -> None:
    async def go() -> None:
        sampler = GreedyBaseline(Answering({"1": EngineError("gone")}), BEHAVIOR, SIZE)
        found = await group(sampler, 1, "1")
        assert all(isinstance(one, EngineError) for one in found)

    asyncio.run(go())


def test_closing_gives_up_what_is_being_answered() -> None:
    async def go() -> None:
        sampler = GreedyBaseline(Answering(slow=True), BEHAVIOR, SIZE)
        samples = asyncio.ensure_future(group(sampler, 1, "1"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await sampler.close()
        found = await samples
        assert not any(isinstance(one, RolloutRecord) for one in found)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(go())


def planned(config: Config, reject: Sequence[int] = ()) -> list[TrainBatch]:
    """A step of the controller whose greedy answer to the n-th prompt of the step has reward n / 2."""

    class Inner(SingleTurn):
        async def answer(self, prompt: Prompt, params: SamplingParams) -> RolloutRecord:
            return replace(make_record(), reward=int(prompt.prompt_id.split("-")[1]) / 2)

    async def go() -> list[TrainBatch]:
        engine, task = FakeEngine(frozenset(reject)), FakeTask()
        sampler = GreedyBaseline(Inner(engine, task, BEHAVIOR), BEHAVIOR, config.rollout.group_size)
        controller = RolloutController(config, engine, task, BEHAVIOR, sampler)
        await controller.load_weights(WeightPush(0, "", ()))
        return await controller.plan(1, data_size=1)

    return asyncio.run(go())


def test_the_advantage_is_the_lead_over_the_greedy_answer() -> None:
    """Also of a sample that is alone in its group because the others were rejected."""
    shares = planned(REMAX, reject=(1, 2, 3))
    rows, found = rows_of(shares), of_step(shares, REMAX)
    assert len([row for row in rows if row.record.group_id == 0]) <= 1
    assert {row.record.group_id for row in rows} >= {1, 2, 3}
    for row in rows:
        assert row.record.reward is not None
        assert row.record.baseline == row.record.group_id / 2
        assert set(found[row.record.row_id]) == {row.record.reward - row.record.group_id / 2}


def test_greedy_answers_are_in_no_batch_and_not_in_the_ledger() -> None:
    [share] = planned(REMAX)
    assert share.metrics["ledger/issued"] == GROUPS * SIZE
    assert share.metrics["greedy/answers"] == GROUPS
    assert len(rows_of([share])) == share.metrics["ledger/trained"] <= GROUPS * SIZE


def test_samples_without_a_baseline_are_refused() -> None:
    async def go() -> None:
        engine, task = FakeEngine(), FakeTask()
        controller = RolloutController(REMAX, engine, task, BEHAVIOR, SingleTurn(engine, task, BEHAVIOR))
        await controller.load_weights(WeightPush(0, "", ()))
        with pytest.raises(ControllerError, match="greedy"):
            await controller.plan(1, data_size=1)

    asyncio.run(go())


def test_a_recording_gives_the_baselines_back_and_one_without_them_is_refused(tmp_path: Path) -> None:
    written = [replace(make_record(sample_id=i, group_id=0), baseline=value) for i, value in enumerate((0.25, -1.0))]
    plain = [make_record(sample_id=i, group_id=0) for i in range(2)]
    for name, records in (("with", written), ("without", plain)):
        BundleWriter(str(tmp_path / name)).write(1, records)
    assert [record.baseline for record in BundleReader(str(tmp_path / "with")).read(1)] == [0.25, -1.0]
    assert [record.baseline for record in BundleReader(str(tmp_path / "without")).read(1)] == [None, None]

    async def sample(name: str) -> RolloutRecord:
        engine, task = BundleEngine(str(tmp_path / name)), FakeTask()
        await engine.start()
        await engine.load_weights(WeightPush(0, "", ()))
        sampler = RecordedBaseline(SingleTurn(engine, task, BEHAVIOR))
        prompt = Prompt(written[0].prompt_id, tuple(written[0].tokens[:4].tolist()))
        return await sampler.sample(prompt, sample_id=0, group_id=0)

    assert asyncio.run(sample("with")).baseline == 0.25
    with pytest.raises(BundleError, match="greedy"):
        asyncio.run(sample("without"))
