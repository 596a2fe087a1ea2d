"""Advantages along a row: golden values, a loop over floats, tools, dropped tokens, and the way to the loss."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_trm.advantages import by_token
from moe_trm.advantages.by_row import grpo
from moe_trm.batch.collate import collate
from moe_trm.config import load
from moe_trm.config.rules import warnings
from moe_trm.config.schema import Config
from moe_trm.errors import ConfigError, RecordRejected
from moe_trm.methods.advantages import BY_TOKEN
from moe_trm.rollout.controller import RolloutController
from moe_trm.sampling_mask.record import SamplingMask
from moe_trm.sampling_mask.violation import drop
from moe_trm.step.advantages import placed
from moe_trm.sync.manifest import WeightPush
from moe_trm.tasks import RewardInput
from moe_trm.types import MicroBatch, Prompt, RolloutRecord, SamplingParams, TrainBatch, TrainRow
from tests.unit.advantages import of_samples, of_step
from tests.unit.records import make_record
from tests.unit.rollout.fake_engine import CONFIG, FakeEngine, FakeTask, rows_of


def test_golden_otb() -> None:
    """Two samples, the first of reward 1: W = [.4, .42, 1.32] and [.55, .85]; the third position is its own."""
    probs, squares = [[0.5, 0.9, 0.2], [0.4, 0.6]], [[0.4, 0.82, 0.3], [0.35, 0.5]]
    energies = [1 - 2 * np.array(p) + np.array(q) for p, q in zip(probs, squares, strict=True)]
    first, second = by_token.otb(np.array([1.0, 0.0]), np.zeros(2, int), energies)
    np.testing.assert_allclose(first, [0.578947, 0.669291, 1.0], atol=1e-6)
    np.testing.assert_allclose(second, [-0.421053, -0.330709], atol=1e-6)


def test_off_policy_the_square_of_the_ratio_weighs() -> None:
    """Energies 7, 7 and 2 of rewards 1, 0 and 1; squared ratios 4, 1/4 and 1, the first of a ratio beyond the cap."""
    records = [make_record(sample_id=i, num_sampled=1) for i in range(3)]
    energies = [by_token.score_energy(record) for record in records]
    ratios = np.log([[9.0], [0.5], [1.0]])
    weights = [
        by_token.weighted_energy(*each) / own
        for each, own in zip(zip(records, ratios, strict=True), energies, strict=True)
    ]
    np.testing.assert_allclose(np.concatenate(weights), [4.0, 0.25, 1.0])
    assert by_token.weighted_energy(records[0], np.array([np.nan])).tolist() == [0.0]
    rewards, groups, sizes = np.array([1.0, 0, 1]), np.zeros(3, int), np.array([[7.0], [7], [2]])
    plain = np.concatenate(by_token.otb(rewards, groups, [*sizes]))
    np.testing.assert_allclose(plain, [0.4375, -0.5625, 0.4375], atol=1e-6)
    weighed = np.concatenate(by_token.otb(rewards, groups, [a * b for a, b in zip(weights, sizes, strict=True)]))
    np.testing.assert_allclose(weighed, [0.055, -0.945, 0.055], atol=2e-4)


def naive_otb(rewards: list[float], groups: list[int], energies: list[list[float]]) -> list[list[float]]:
    """The definition, one token after another."""
    found: list[list[float]] = []
    for i, own in enumerate(energies):
        found.append([])
        for t in range(len(own)):
            running = [j for j in range(len(rewards)) if groups[j] == groups[i] and len(energies[j]) > t]
            weight = {j: sum(energies[j][: t + 1]) for j in running}
            baseline = sum(rewards[j] * weight[j] for j in running) / (sum(weight.values()) + 1e-8)
            found[-1].append(rewards[i] - (baseline if len(running) > 1 else 0.0))
    return found


Sample = tuple[int, float, list[float]]
samples = st.lists(
    st.tuples(st.integers(0, 2), st.floats(-1, 2), st.lists(st.floats(0, 2), max_size=5)), min_size=1, max_size=8
)


@given(samples)
def test_otb_is_the_loop_in_groups_of_any_order(made: list[Sample]) -> None:
    groups, rewards, energies = (list(column) for column in zip(*made, strict=True))
    got = by_token.otb(np.array(rewards), np.array(groups), [np.array(own) for own in energies])
    for own, expected in zip(got, naive_otb(rewards, groups, energies), strict=True):
        np.testing.assert_allclose(own, expected, atol=1e-9)


def test_energy_is_of_the_recorded_support() -> None:
    """Kept with 0.5, 0.25, 0.25, sampled the first: 1 - 1 + 0.375; one row of another distribution."""
    record = make_record(num_sampled=3)
    np.testing.assert_allclose(by_token.score_energy(record), 0.375, atol=1e-6)
    support = np.log([0.7, 0.2, 0.1, 1.0, 0.25, 0.75]).astype(np.float32)
    mask = SamplingMask(np.arange(6, dtype=np.int32), np.array([0, 3, 4, 6]), support)
    record = replace(record, sampling_mask=mask, rollout_logprobs=np.log([0.2, 1.0, 0.75]).astype(np.float32))
    expected = [1 - 0.4 + 0.54, 0.0, 1 - 1.5 + 0.625]
    np.testing.assert_allclose(by_token.score_energy(record), expected, atol=1e-6)


def test_the_energy_is_the_squared_norm_of_the_score() -> None:
    """|d log p(y) / d logits|^2 by differences, for a softmax over four ids."""
    logits, y = np.array([0.3, -1.0, 0.8, 0.1]), 2

    def log_p(z: np.ndarray) -> float:
        return float(z[y] - np.log(np.exp(z).sum()))

    steps = 1e-6 * np.eye(4)
    score = [(log_p(logits + step) - log_p(logits - step)) / 2e-6 for step in steps]
    p = np.exp(logits) / np.exp(logits).sum()
    assert 1 - 2 * p[y] + (p**2).sum() == pytest.approx(sum(s * s for s in score), rel=1e-6)


def advantages_of(records: Sequence[RolloutRecord], name: str, **settings: Any) -> list[np.ndarray]:
    """Of the scored tokens of each record."""
    return [np.concatenate(own) for own in of_samples(records, name, advantage=settings)]


def test_a_dropped_token_has_no_place() -> None:
    """Its neighbours align as if it were a tool token."""
    whole, cut = make_record(sample_id=1, num_sampled=4), make_record(sample_id=2, num_sampled=5, reward=0.0)
    assert cut.sampling_mask is not None
    cut = replace(cut, sampling_mask=drop(cut.sampling_mask, np.array([False, True, False, False, False])))
    first, second = advantages_of([whole, cut], "otb")
    np.testing.assert_allclose(first, 0.5, atol=1e-6)
    np.testing.assert_allclose(second, [-0.5] * 4, atol=1e-6)


def two_turns(sample_id: int, lengths: tuple[int, ...], reward: float, tool: int = 2) -> RolloutRecord:
    """A record of these turns with tool tokens between them."""
    flat = make_record(sample_id=sample_id, num_sampled=sum(lengths), reward=reward)
    kinds = [(False, 0)] * 4
    for turn, length in enumerate(lengths):
        kinds += [(False, turn)] * (tool if turn else 0) + [(True, turn)] * length
    tokens = np.zeros(len(kinds), np.int32)
    sampled = np.array([here for here, _ in kinds])
    tokens[sampled] = flat.tokens[4:]
    return replace(
        flat, tokens=tokens, sampled=sampled, turn_ids=np.array([t for _, t in kinds], np.int16), routes=None
    )


def test_turns_are_compared_with_turns() -> None:
    """Three samples, two of which go on: their second turn is compared among the two alone."""
    records = [two_turns(0, (2, 3), 1.0), two_turns(1, (1, 1), 0.0), two_turns(2, (4,), 0.0)]
    got = advantages_of(records, "turn_grpo")
    first, second = grpo(np.array([1.0, 0, 0]), np.zeros(3, int)), grpo(np.array([1.0, 0]), np.zeros(2, int))
    np.testing.assert_allclose(got[0], [first[0]] * 2 + [second[0]] * 3)
    np.testing.assert_allclose(got[1], [first[1], second[1]])
    np.testing.assert_allclose(got[2], [first[2]] * 4)


def test_early_turns_count_less_with_a_discount() -> None:
    """G = [.5, 1] and [.5, 1] times the reward; without the standard deviation these are plain differences."""
    records = [two_turns(0, (1, 1), 1.0), two_turns(1, (1, 1), 0.0)]
    got = advantages_of(records, "turn_grpo", turn_discount=0.5, normalize_std=False)
    np.testing.assert_allclose(np.stack(got), [[0.25, 0.5], [-0.25, -0.5]])


def test_one_turn_is_grpo_and_a_turn_alone_is_a_lone_sample() -> None:
    rewards = [1.0, 0.0, 0.5]
    records = [make_record(sample_id=i, num_sampled=2 + i, reward=reward) for i, reward in enumerate(rewards)]
    got = advantages_of(records, "turn_grpo")
    for own, value in zip(got, grpo(np.array(rewards), np.zeros(3, int)), strict=True):
        np.testing.assert_array_equal(own, value)
    longer = [two_turns(0, (1, 2), 0.7), two_turns(1, (1,), 0.2)]
    for lone, value in (("reward", 0.7), ("zero", 0.0)):
        got = advantages_of(longer, "turn_grpo", lone_sample=lone)
        np.testing.assert_allclose(got[0][1:], value)


@pytest.mark.parametrize("name", sorted(BY_TOKEN))
def test_a_group_of_one(name: str) -> None:
    alone = [make_record(num_sampled=3, reward=0.7)]
    np.testing.assert_allclose(advantages_of(alone, name)[0], 0.7)
    assert not advantages_of(alone, name, lone_sample="zero")[0].any()


def test_tool_tokens_change_nothing() -> None:
    """The same two samples with no, few and many tool tokens."""
    plain, few, many = ([two_turns(0, (2, 3), 1.0, tool), two_turns(1, (1, 2), 0.0, tool)] for tool in (0, 1, 7))
    for name in BY_TOKEN:
        expected = advantages_of(plain, name)
        for other in (few, many):
            for one, two in zip(expected, advantages_of(other, name), strict=True):
                np.testing.assert_array_equal(one, two)


def test_a_record_without_its_support_is_refused() -> None:
    record = make_record()
    assert record.sampling_mask is not None
    for mask in (None, replace(record.sampling_mask, logprobs=None)):
        with pytest.raises(RecordRejected, match="sampling mask") as caught:
            by_token.score_energy(replace(record, sampling_mask=mask))
        assert caught.value.reason == "mask_missing"


def test_the_learner_gets_every_token_its_own_advantage() -> None:
    """A row of one advantage beside a row of several, one of whose tokens was dropped."""
    first, second = make_record(sample_id=0, num_sampled=4), make_record(sample_id=1, num_sampled=3)
    assert first.sampling_mask is not None
    first = replace(first, sampling_mask=drop(first.sampling_mask, np.array([False, True, False, False])))
    batch = collate(MicroBatch((TrainRow(first), TrainRow(second))), keep_mask=True)
    assert torch.equal(batch.advantages.isnan(), batch.mask), "not known yet"
    batch = placed(batch, [np.array([0.5, -1.0, 2.0]), np.full(3, -2.0)], [0.5, 0.5])
    assert batch.advantages[0][batch.mask[0]].tolist() == [0.5, -1.0, 2.0]
    assert batch.advantages[1][batch.mask[1]].tolist() == [-2.0] * 3
    assert not batch.advantages[~batch.mask].any()
    assert batch.group_means is not None
    assert batch.group_means.tolist() == [0.5, 0.5]


class OneWithoutMask(FakeEngine):
    """One sample among many comes without the log-probs of its support."""

    async def generate(self, prompt: Prompt, params: SamplingParams, *, sample_id: int, group_id: int) -> RolloutRecord:
        record = await super().generate(prompt, params, sample_id=sample_id, group_id=group_id)
        return replace(record, sampling_mask=None) if sample_id == 5 else record


class EvenTask(FakeTask):
    async def reward(self, sample: RewardInput) -> object:
        return float(sum(sample.completion_ids) % 2)


def config_of(**changes: Mapping[str, Any]) -> Config:
    sections = CONFIG.model_dump(exclude_unset=True)
    sections["rollout"] |= {"top_k": 3}  # the made-up sets are cut by it, so their mass is free
    return Config.model_validate({**sections, "sampling_mask": {"mode": "keep"}, **changes})


def planned(engine: FakeEngine, **changes: Mapping[str, Any]) -> list[TrainBatch]:
    async def go() -> list[TrainBatch]:
        controller = RolloutController(config_of(**changes), engine, EvenTask(), SamplingParams())
        await controller.load_weights(WeightPush(0, "", ()))
        return await controller.plan(1, data_size=2)

    return asyncio.run(go())


def test_a_run_with_one_bad_sample_counts_it_and_trains_the_rest_by_token() -> None:
    shares = planned(OneWithoutMask(), advantage={"name": "otb"})
    rows = sorted(rows_of(shares), key=lambda row: row.record.sample_id)
    assert shares[0].metrics["records/rejected/mask_missing"] == 1
    assert [row.record.sample_id for row in rows] == [i for i in range(16) if i != 5]
    expected = advantages_of([row.record for row in rows], "otb")
    found = of_step(shares, config_of(advantage={"name": "otb"}))
    for row, own in zip(rows, expected, strict=True):
        np.testing.assert_array_equal(found[row.record.row_id], own)
    assert any(np.ptp(own) > 0.1 for own in expected)


def test_overlong_samples_are_masked_by_token_too() -> None:
    class Cut(FakeEngine):
        async def generate(self, *args: Any, **kwargs: Any) -> RolloutRecord:
            record = await super().generate(*args, **kwargs)
            return replace(record, finish_reason="length") if record.sample_id == 3 else record

    sections: dict[str, Any] = {"advantage": {"name": "otb"}, "batch": {"overlong": "mask"}}
    found = of_step(planned(Cut(), **sections), config_of(**sections))
    assert not found[3].any()
    assert any(own.any() for own in found.values())


def test_refused_and_idle_at_launch(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("model: {checkpoint: none}\n")
    with pytest.raises(ConfigError, match="distribution that each token was drawn from"):
        load(file, ["advantage.name=otb", "sampling_mask.mode=off"])
    for name in BY_TOKEN:
        with pytest.raises(ConfigError, match="would lower them afterwards"):
            load(file, [f"advantage.name={name}", "kl.coef=0.1", "kl.where=reward"])
        with pytest.raises(ConfigError, match="no baseline"):
            load(file, [f"advantage.name={name}", "rollout.group_size=1", "batch.zero_variance=keep"])
    with pytest.raises(ConfigError, match="turn_grpo"):
        load(file, ["advantage.name=turn_grppo"])
    for name, mode in (("otb", "keep"), ("opob", "keep"), ("turn_grpo", "off")):
        assert load(file, [f"advantage.name={name}"]).sampling_mask.mode == mode  # what `auto` becomes
    told = warnings(load(file, ["advantage.name=turn_grpo", "advantage.normalize_std=false"]))
    assert any("advantage.name has no effect: without rollout.function" in line for line in told)
    assert not any("normalize_std" in line for line in told)
    told = warnings(load(file, ["advantage.turn_discount=0.5", "advantage.name=otb", "advantage.normalize_std=true"]))
    assert sum("has no such choice" in line for line in told) == 2
    assert math.isclose(load(file, []).advantage.turn_discount, 1.0)
