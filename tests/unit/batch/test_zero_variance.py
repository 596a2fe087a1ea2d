"""Advantages of groups without a difference in reward: golden values, a loop over floats, and the way into a step."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace

import numpy as np
import pytest

from moe_trm.advantages.zero_variance import entropy_shaped, support_entropy
from moe_trm.config import load
from moe_trm.config.advantage_rules import refusals
from moe_trm.config.schema import AdvantageConfig, Config
from moe_trm.errors import RecordRejected
from moe_trm.rollout.controller import RolloutController
from moe_trm.sampling_mask.record import SamplingMask
from moe_trm.sampling_mask.violation import drop
from moe_trm.sync.manifest import WeightPush
from moe_trm.tasks import RewardInput
from moe_trm.types import RolloutRecord, SamplingParams, TrainBatch
from tests.unit.advantages import of_samples, of_step
from tests.unit.records import make_record
from tests.unit.rollout.fake_engine import CONFIG, FakeEngine, FakeTask
from tests.unit.sections import sections_of


def record_of(probs: list[list[float]], *, sample_id: int = 0, group_id: int = 0, reward: float = 1.0) -> RolloutRecord:
    """A record whose tokens were drawn from these distributions, the first id of each being the token."""
    plain = make_record(sample_id=sample_id, group_id=group_id, num_sampled=len(probs), reward=reward)
    tokens = plain.tokens[plain.sampled]
    ids = np.concatenate([(token + np.arange(len(own))) % 32 for token, own in zip(tokens, probs, strict=True)])
    offsets = np.cumsum([0, *map(len, probs)])
    logs = np.log(np.concatenate(probs)).astype(np.float32)
    mask = SamplingMask(ids.astype(np.int32), offsets.astype(np.int64), logs).ascending()
    return replace(plain, sampling_mask=mask)


def test_golden() -> None:
    entropies = np.array([0.5, 2.0, 0.0])
    assert entropy_shaped(entropies, right=True, scale=0.1).tolist() == pytest.approx([0.05, 0.2, 0.0])
    assert entropy_shaped(entropies, right=False, scale=0.1).tolist() == pytest.approx([-0.15, 0.0, -0.2])
    assert entropy_shaped(np.zeros(0), right=False, scale=0.1).shape == (0,)


def test_entropy_of_the_kept_support_against_a_loop() -> None:
    probs = [[0.5, 0.25, 0.25], [1.0], [0.9, 0.1], [0.2] * 5]
    expected = [-sum(p * math.log(p) for p in own) for own in probs]
    assert support_entropy(record_of(probs)).tolist() == pytest.approx(expected, abs=1e-6)
    impossible = record_of([[0.5, 0.5]])
    assert impossible.sampling_mask is not None
    never = replace(impossible.sampling_mask, logprobs=np.array([0.0, -np.inf], np.float32))
    assert support_entropy(replace(impossible, sampling_mask=never)).tolist() == [0.0]
    with pytest.raises(RecordRejected, match="mask"):
        support_entropy(replace(impossible, sampling_mask=None))


def group_of(rewards: list[float], group_id: int) -> list[RolloutRecord]:
    """Samples whose tokens differ in entropy."""
    probs = [[0.5, 0.25, 0.25], [0.9, 0.1], [0.7, 0.2, 0.1]]
    return [
        record_of(probs[: 1 + number % 3], sample_id=10 * group_id + number, group_id=group_id, reward=reward)
        for number, reward in enumerate(rewards)
    ]


def shaped(records: list[RolloutRecord], scale: float, overlong: str = "keep") -> list[list[float]]:
    """Advantages of the scored tokens of each."""
    settings = {"normalize_std": False, "lone_sample": "zero", "zero_variance_scale": scale}
    return [own.tolist() for [own] in of_samples(records, "grpo", advantage=settings, batch={"overlong": overlong})]


def test_only_groups_of_several_samples_and_one_reward_are_shaped() -> None:
    made = [*group_of([1.0, 1.0, 1.0], 0), *group_of([1.0, 0.0], 1), *group_of([0.0, 0.0], 2), *group_of([1.0], 3)]
    found, plain = shaped(made, 0.1), shaped(made, 0.0)
    for record, own, before in zip(made, found, plain, strict=True):
        if record.group_id in (1, 3):
            assert own == before
            continue
        assert not any(before)
        entropies = support_entropy(record)
        right = record.group_id == 0
        assert own == pytest.approx([0.1 * h if right else -0.1 * (max(entropies) - h) for h in entropies.tolist()])
    assert any(value < 0 for own in found for value in own)


def test_tokens_dropped_by_their_mask_and_overlong_samples_get_nothing() -> None:
    whole, cut, short = group_of([1.0, 1.0, 1.0], 0)
    assert short.sampling_mask is not None
    short = replace(short, sampling_mask=drop(short.sampling_mask, np.array([False, True, False])))
    cut = replace(cut, finish_reason="length")
    found = shaped([whole, cut, short], 0.1, overlong="mask")
    assert not any(found[1])
    assert [value > 0 for value in found[2]] == [True, True]
    assert len(found[2]) == short.num_scored == 2


def test_a_step_of_equal_rewards_has_a_gradient() -> None:
    class AllRight(FakeTask):
        async def reward(self, sample: RewardInput) -> object:
            return 1.0

    def settings(scale: float) -> Config:
        rollout = CONFIG.rollout.model_copy(update={"top_k": 3})  # the made-up sets are cut by it: their mass is free
        return CONFIG.model_copy(update={"rollout": rollout, "advantage": AdvantageConfig(zero_variance_scale=scale)})

    async def go(config: Config) -> list[TrainBatch]:
        controller = RolloutController(config, FakeEngine(), AllRight(), SamplingParams())
        await controller.load_weights(WeightPush(0, "", ()))
        return await controller.plan(1, data_size=1)

    def found(scale: float) -> list[list[float]]:
        config = settings(scale)
        return [own.tolist() for own in of_step(asyncio.run(go(config)), config).values()]

    assert not any(any(own) for own in found(0.0))
    entropy = -(0.5 * math.log(0.5) + 2 * 0.25 * math.log(0.25))
    for own in found(0.1):
        assert own == pytest.approx([0.1 * entropy] * len(own), abs=1e-6)


def config(**sections: dict[str, object]) -> Config:
    return Config.model_validate(
        {
            "model": {"checkpoint": "x"},
            **sections,
            "advantage": {"zero_variance_scale": 0.1, **sections.get("advantage", {})},
        }
    )


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"sampling_mask": {"mode": "off"}}, "sampling_mask.mode"),
        ({"batch": {"zero_variance": "drop"}}, "batch.zero_variance"),
        ({"kl": {"coef": 0.1, "where": "reward"}}, "kl.where"),
        ({"advantage": {"name": "otb"}}, "advantage.zero_variance_scale"),
        ({"advantage": {"name": "opob"}}, "advantage.zero_variance_scale"),
        ({"advantage": {"name": "remax"}}, "advantage.zero_variance_scale"),
    ],
)
def test_what_cannot_work_is_refused(sections: dict[str, dict[str, object]], key: str) -> None:
    assert key in [
        problem.key
        for problem in refusals(*sections_of(config(**sections), "advantage", "keeps_masks", "kl", "pipeline", "batch"))
    ]


def test_the_mask_is_recorded_without_being_asked_for() -> None:
    assert config().keeps_masks
    assert not [*refusals(*sections_of(config(), "advantage", "keeps_masks", "kl", "pipeline", "batch"))]
    assert load("configs/papers.yaml", ["advantage.zero_variance_scale=0.1"]).sampling_mask.mode == "keep"
