from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace

import pytest

from moe_trm.config.schema import EvalConfig, RolloutConfig, TaskConfig
from moe_trm.config.task_rules import best_metric, greedy_metric
from moe_trm.errors import RecordRejected
from moe_trm.rollout.evaluation import Evaluator
from moe_trm.types import Prompt, RolloutRecord, SamplingParams
from tests.unit.records import make_record

BEHAVIOR = SamplingParams(temperature=0.7, top_p=0.9, top_k=50, min_p=0.1, max_new_tokens=40, stop_token_ids=(2,))


class Answers:
    """A sampler that gives the rewards it is told, greedy first, and remembers with which parameters it was asked."""

    def __init__(self, rewards: Mapping[str, list[float | None]]) -> None:
        self.left = {name: list(values) for name, values in rewards.items()}
        self.asked: list[SamplingParams] = []
        self.busy = self.most_busy = 0

    async def sample(self, prompt: Prompt, *, sample_id: int, group_id: int) -> RolloutRecord:
        raise AssertionError("an evaluation makes no training samples")

    async def answer(self, prompt: Prompt, params: SamplingParams) -> RolloutRecord:
        self.asked.append(params)
        self.busy += 1
        self.most_busy = max(self.most_busy, self.busy)
        await asyncio.sleep(0)
        self.busy -= 1
        reward = self.left[prompt.prompt_id].pop(0)
        if reward is None:
            raise RecordRejected("reward_error", "no reward")
        parts = {"right": float(reward >= 1), "style": round(reward % 1, 6)} if reward % 1 else {}
        return replace(make_record(num_sampled=4), reward=reward, reward_parts=parts)

    def metrics(self) -> dict[str, float]:
        return {}

    async def close(self) -> None: ...


def measure(
    settings: EvalConfig, sets: dict[str, dict[str, list[float | None]]], greedy_metric: str = "accuracy"
) -> tuple[dict[str, float], Answers]:
    sampler = Answers({name: rewards for prompts in sets.values() for name, rewards in prompts.items()})
    prompts = {name: [Prompt(one, (1,)) for one in rewards] for name, rewards in sets.items()}
    evaluator = Evaluator(settings, sampler, prompts, BEHAVIOR, greedy_metric=greedy_metric, concurrency=2)
    return asyncio.run(evaluator.measure()), sampler


def test_greedy_and_sampled_metrics_of_every_set() -> None:
    metrics, sampler = measure(
        EvalConfig(samples=2, temperature=0.5, max_new_tokens=7),
        {"": {"a": [1, 0, 1], "b": [0, 0, 0]}, "hard": {"c": [0, 0, 1]}},
    )
    assert metrics == {
        "eval/prompts": 2,
        "eval/accuracy": 0.5,
        "eval/accuracy_se": (0.25 / 6) ** 0.5,
        "eval/length_mean": 4,
        "eval/finished_fraction": 1,
        "eval/avg_at_2": 0.25,
        "eval/pass_at_2": 0.5,
        "eval/hard/prompts": 1,
        "eval/hard/accuracy": 0,
        "eval/hard/length_mean": 4,
        "eval/hard/finished_fraction": 1,
        "eval/hard/avg_at_2": 0.5,
        "eval/hard/pass_at_2": 1,
    }
    greedy = SamplingParams(top_k=1, max_new_tokens=7, stop_token_ids=(2,))
    sampled = replace(BEHAVIOR, temperature=0.5, top_p=1.0, min_p=0.0, max_new_tokens=7)
    assert sampler.asked.count(greedy) == 3
    assert sampler.asked.count(sampled) == 6


def test_a_mean_has_a_standard_error_over_prompts() -> None:
    """A hundred right answers leave some doubt, four leave much, and one shows nothing."""
    errors = []
    for number in (1, 4, 100):
        metrics, _ = measure(EvalConfig(), {"": {str(place): [1] for place in range(number)}})
        errors.append(metrics.get("eval/accuracy_se", 1.0))
    assert errors == pytest.approx([1.0, (0.75 * 0.25 / 8) ** 0.5, (102 / 104 * 2 / 104 / 104) ** 0.5])
    metrics, _ = measure(EvalConfig(), {"": {"a": [0.5], "b": [1.5], "c": [1.0]}}, "reward")
    assert metrics["eval/reward_se"] == pytest.approx(0.5 / 3**0.5)


def test_an_answer_without_a_reward_is_wrong(caplog: pytest.LogCaptureFixture) -> None:
    """Else an accuracy would rise with every answer that runs out of time."""
    metrics, sampler = measure(EvalConfig(samples=2), {"": {"a": [None, 1, None], "b": [1, None, None]}})
    assert metrics["eval/accuracy"] == 0.5
    assert metrics["eval/avg_at_2"] == 0.25
    assert metrics["eval/pass_at_2"] == 0.5
    assert metrics["eval/rejected/reward_error"] == 4
    assert metrics["eval/answered_fraction"] == 0.5
    assert "1 of 2 greedy answers have no reward and count as wrong" in caplog.text
    assert sampler.most_busy == 2, "the time of an answer begins with its turn"
    nothing, _ = measure(EvalConfig(), {"": {"a": [None]}})
    assert nothing["eval/accuracy"] == nothing["eval/answered_fraction"] == 0


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_an_answer_without_a_reward_of_your_own_is_left_out(scale: float, caplog: pytest.LogCaptureFixture) -> None:
    """Where the reward is not right or wrong, or need not be in the next evaluation, no number stands for it."""
    name = "reward" if scale == 1.0 else "accuracy"
    answers = {"a": [None, scale, None], "b": [scale, None, None]}
    metrics, _ = measure(EvalConfig(samples=2), {"": answers}, name)
    assert metrics["eval/reward"] == metrics["eval/avg_at_2"] == scale
    assert metrics["eval/answered_fraction"] == 0.5
    assert "are left out of the figures" in caplog.text


def test_rewards_that_are_not_right_or_wrong_make_no_share() -> None:
    """A composite of an agent, say: neither an accuracy nor a pass@k, and its parts are told."""
    metrics, _ = measure(EvalConfig(samples=2), {"": {"a": [1.1, 0.2, 1.1], "b": [0.2, 0.0, 1.0]}})
    assert metrics.keys() >= {"eval/reward", "eval/avg_at_2", "eval/best_at_2"}
    assert not metrics.keys() & {"eval/accuracy", "eval/pass_at_2"}
    own, _ = measure(EvalConfig(samples=2), {"": {"a": [1, 0, 1], "b": [0, 0, 0]}}, "reward")
    assert own["eval/best_at_2"] == own["eval/pass_at_2"] == 0.5, (
        "it may be 0 or 1 in one evaluation and not in another"
    )
    assert metrics["eval/reward"] == pytest.approx(0.65)
    assert metrics["eval/best_at_2"] == pytest.approx(1.05)
    assert metrics["eval/reward/right"] == 0.5
    assert metrics["eval/reward/style"] == pytest.approx(0.15)


@pytest.mark.parametrize(
    ("rollout", "reward", "name"),
    [
        ({}, None, "accuracy"),
        ({}, "math_verify", "accuracy"),
        ({}, "own.py:reward", "reward"),
        ({"agent": "own.py:agent"}, None, "reward"),
        ({"agent": ["python", "agent.py"]}, None, "reward"),
        ({"function": "own.py:rollout"}, None, "reward"),
        ({"function": "own.py:rollout"}, "exact", "accuracy"),
    ],
)
def test_a_mean_is_an_accuracy_only_where_the_reward_says_right_or_wrong(
    rollout: dict[str, object], reward: str | None, name: str
) -> None:
    task, side = TaskConfig(reward=reward), RolloutConfig.model_validate(rollout)
    assert greedy_metric(task, side) == name
    assert best_metric(EvalConfig(), task, side) == f"eval/{name}"


def test_nothing_measured_is_nothing_said() -> None:
    assert measure(EvalConfig(), {})[0] == {}
    assert measure(EvalConfig(), {"": {}})[0] == {"eval/prompts": 0}
    none, _ = measure(EvalConfig(), {"": {"a": [None]}}, "reward")
    assert not none.keys() & {"eval/accuracy", "eval/reward"}
