"""Advantages of groups without a difference in reward: golden values, a loop over floats, and the way into a step."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace

import numpy as np
import pytest

from moe_trm.batch.collate import collate
from moe_trm.batch.zero_variance import entropy_shaped, shaped, support_entropy
from moe_trm.config import load
from moe_trm.config.advantage_rules import refusals
from moe_trm.config.schema import AdvantageConfig, BatchConfig, Config
from moe_trm.errors import RecordRejected
from moe_trm.rollout.controller import RolloutController
from moe_trm.sampling_mask.record import SamplingMask
from moe_trm.sampling_mask.violation import drop
from moe_trm.sync.manifest import WeightPush
from moe_trm.tasks import RewardInput
from moe_trm.types import MicroBatch, RolloutRecord, SamplingParams, TrainBatch, TrainRow
from tests.unit.records import make_record
from tests.unit.rollout.fake_engine import CONFIG, FakeEngine, FakeTask, rows_of
from tests.unit.sections import sections_of

KEEP = BatchConfig()


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


def group_of(rewards: list[float], group_id: int) -> list[TrainRow]:
    """Rows with the advantages of GRPO without a scale, and tokens of different entropy."""
    probs = [[0.5, 0.25, 0.25], [0.9, 0.1], [0.7, 0.2, 0.1]]
    records = [
        record_of(probs[: 1 + number % 3], sample_id=10 * group_id + number, group_id=group_id, reward=reward)
        for number, reward in enumerate(rewards)
    ]
    return [TrainRow(record, (record.reward or 0.0) - float(np.mean(rewards))) for record in records]


def test_only_groups_of_several_samples_and_one_reward_are_shaped() -> None:
    rows = [*group_of([1.0, 1.0, 1.0], 0), *group_of([1.0, 0.0], 1), *group_of([0.0, 0.0], 2), *group_of([1.0], 3)]
    found = shaped(rows, 0.1, KEEP)
    assert [row.record.sample_id for row in found] == [row.record.sample_id for row in rows]
    for row, before in zip(found, rows, strict=True):
        if row.record.group_id in (1, 3):
            assert row is before
            continue
        entropies = support_entropy(row.record)
        right = row.record.group_id == 0
        expected = [0.1 * h if right else -0.1 * (max(entropies) - h) for h in entropies.tolist()]
        assert row.token_advantages is not None
        assert row.token_advantages.tolist() == pytest.approx(expected, abs=1e-7)
        assert row.advantage == pytest.approx(np.mean(expected), abs=1e-7)
    assert any((row.token_advantages < 0).any() for row in found if row.token_advantages is not None)
    assert shaped(rows, 0.0, KEEP) == rows


def test_tokens_dropped_by_their_mask_and_overlong_samples_get_nothing() -> None:
    rows = group_of([1.0, 1.0, 1.0], 0)
    mask = rows[2].record.sampling_mask
    assert mask is not None
    short = replace(rows[2].record, sampling_mask=drop(mask, np.array([False, True, False])))
    cut = replace(rows[1].record, finish_reason="length")
    rows = [rows[0], replace(rows[1], record=cut), replace(rows[2], record=short)]
    found = shaped(rows, 0.1, BatchConfig(overlong="mask"))
    assert found[1].token_advantages is not None
    assert not found[1].token_advantages.any()
    assert found[2].token_advantages is not None
    assert [value > 0 for value in found[2].token_advantages.tolist()] == [True, False, True]
    # Rows that differ along themselves and rows that do not, in one micro-batch.
    batch = collate(MicroBatch((*found, TrainRow(make_record(sample_id=9, group_id=9), -2.0))), keep_mask=True)
    assert set(batch.advantages[3][batch.mask[3]].tolist()) == {-2.0}
    assert batch.advantages[0][batch.mask[0]].tolist() == pytest.approx(found[0].token_advantages.tolist())


def test_a_step_of_equal_rewards_has_a_gradient() -> None:
    class AllRight(FakeTask):
        async def reward(self, sample: RewardInput) -> object:
            return 1.0

    async def go(scale: float) -> list[TrainBatch]:
        config = CONFIG.model_copy(update={"advantage": AdvantageConfig(zero_variance_scale=scale)})
        controller = RolloutController(config, FakeEngine(), AllRight(), SamplingParams())
        await controller.load_weights(WeightPush(0, "", ()))
        return await controller.plan(1, data_size=1)

    assert not any(row.advantage for row in rows_of(asyncio.run(go(0.0))))
    entropy = -(0.5 * math.log(0.5) + 2 * 0.25 * math.log(0.25))
    for row in rows_of(asyncio.run(go(0.1))):
        assert row.token_advantages is not None
        assert row.token_advantages.tolist() == pytest.approx([0.1 * entropy] * row.record.num_sampled, abs=1e-6)


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
