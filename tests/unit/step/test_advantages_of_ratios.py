"""VCPO's baseline: golden values, a loop over floats, and the way from a step's ratios to the batches of all ranks."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_trm.advantages.by_row import opob
from moe_trm.advantages.by_token import otb, score_energy, weighted_energy
from moe_trm.advantages.compared import rewarded_samples
from moe_trm.batch.collate import collate
from moe_trm.batch.plan import plan_step
from moe_trm.config import InvalidConfigError, load
from moe_trm.config.schema import Config
from moe_trm.learner.protocol import Scores
from moe_trm.step.anchors import Anchors
from moe_trm.step.passes import AnchoredMinibatch
from moe_trm.types import MicroBatch, TrainBatch, TrainRow
from routing.record.sources import Native
from tests.unit.advantages import estimator
from tests.unit.step.shared_minibatch import FakeLearner, Ranks, anchor_logprobs, config, rows


def test_golden_baseline() -> None:
    """w = [1, 1, 1, 5] and score norms [1, 2, 1, 1] of rewards [1, 0, 1, 0]: b = 0.064516."""
    rewards, energies = np.array([1.0, 0, 1, 0]), np.array([1.0, 4, 1, 1])
    got = opob(rewards, np.zeros(4, int), np.log([1.0, 1, 1, 5]), energies)
    np.testing.assert_allclose(got, rewards - 0.064516, atol=1e-6)
    scaled = opob(rewards, np.zeros(4, int), np.log([7.0, 7, 7, 35]) - 900, energies)
    np.testing.assert_allclose(scaled, got, atol=1e-6)


samples = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 4), st.floats(-3, 3), st.floats(0.1, 5)), min_size=1, max_size=9
)


@given(samples)
def test_by_a_loop(made: list[tuple[int, int, float, float]]) -> None:
    groups, rewards, logs, energies = (list(column) for column in zip(*made, strict=True))
    got = opob(np.array(rewards), np.array(groups), np.array(logs), np.array(energies))
    for i in range(len(made)):
        own = [j for j in range(len(made)) if groups[j] == groups[i]]
        top = max(logs[j] for j in own)
        weight = {j: math.exp(logs[j] - top) ** 2 * energies[j] for j in own}
        baseline = sum(weight[j] * rewards[j] for j in own) / (sum(weight.values()) + 1e-8)
        assert got[i] == pytest.approx(rewards[i] - baseline if len(own) > 1 else 0.0, abs=1e-9)


def test_a_row_of_unknown_ratio_counts_for_nothing() -> None:
    rewards, groups = np.array([1.0, 0, 5, 1, 2]), np.array([0, 0, 0, 1, 1])
    got = opob(rewards, groups, np.array([0.0, 0, np.nan, np.inf, np.nan]), np.ones(5))
    np.testing.assert_allclose(got, [0.5, -0.5, 4.5, 0, 0], atol=1e-6)
    alone = opob(rewards[:1], groups[:1], np.zeros(1), np.ones(1), lone="reward")
    assert alone.tolist() == [1.0]


SETTINGS = {"advantage": {"name": "opob"}, "sampling_mask": {"mode": "keep"}, "batch": {"overlong": "mask"}}


def step_rows() -> list[TrainRow]:
    made = rows()
    made[3] = replace(made[3], record=replace(made[3].record, finish_reason="length"))
    return made


def shared(ranks: int, micro_batch_rows: int, settings: Config) -> dict[int, list[float]]:
    """Advantages of each sample's tokens; the last micro-batches may be empty."""
    shares = plan_step(step_rows(), seed=0, step=1, minibatches=2, data_size=ranks, micro_batch_rows=micro_batch_rows)
    meeting, found = Ranks(ranks), dict[int, list[float]]()
    compared = rewarded_samples("opob", [row.record for row in step_rows()])

    def work(rank: int) -> None:
        parts = []
        for mini in shares[rank]:
            batches = [collate(micro, keep_mask=False) for micro in mini.micro_batches]
            scores = [Scores(anchor_logprobs(batch)) for batch in batches]
            parts.append(AnchoredMinibatch(mini, batches, scores, [Native()] * len(batches)))
        for part in estimator(settings).add_advantages(FakeLearner(meeting, rank), parts, (compared,)):
            for batch, micro in zip(part.batches, part.mini.micro_batches, strict=True):
                assert not batch.advantages[~batch.mask].any()
                for i, row in enumerate(micro.rows):
                    found[row.record.sample_id] = batch.advantages[i][batch.mask[i]].tolist()

    with ThreadPoolExecutor(ranks) as pool:
        list(pool.map(work, range(ranks)))
    return found


def test_the_step_is_compared_whole_however_ranks_share_it() -> None:
    whole = shared(1, 100, config(**SETTINGS))
    for ranks, size in ((2, 2), (3, 5)):
        other = shared(ranks, size, config(**SETTINGS))
        assert other.keys() == whole.keys() == set(range(12))
        for sample, values in whole.items():
            assert other[sample] == pytest.approx(values, abs=1e-6)
    made = sorted(step_rows(), key=lambda row: row.record.sample_id)
    records = [row.record for row in made]
    batch = collate(MicroBatch(tuple(made)), keep_mask=False)
    logs = (anchor_logprobs(batch) - batch.rollout_logprobs).sum(dim=1).double().numpy()
    energies = np.array([score_energy(record).sum() for record in records])
    rewards, groups = np.array([r.reward for r in records]), np.array([r.group_id for r in records])
    expected = opob(rewards, groups, logs, energies)
    at_one = opob(rewards, groups, 0 * logs, energies)
    assert np.abs(expected - at_one).max() > 0.01, "the ratios should matter"
    for number, values in whole.items():
        assert values == pytest.approx([0.0 if number == 3 else expected[number]] * len(values), abs=1e-5)


def test_baselines_of_tokens_weigh_by_the_ratios_of_all_ranks() -> None:
    found = shared(3, 5, config(**{**SETTINGS, "advantage": {"name": "otb"}}))
    made = sorted(step_rows(), key=lambda row: row.record.sample_id)
    records = [row.record for row in made]
    batch = collate(MicroBatch(tuple(made)), keep_mask=False)
    gaps = anchor_logprobs(batch) - batch.rollout_logprobs
    logs = [gap[mask].double().numpy() for gap, mask in zip(gaps, batch.mask, strict=True)]
    rewards, groups = np.array([r.reward for r in records]), np.array([r.group_id for r in records])
    weighed, plain = (
        otb(rewards, groups, [weighted_energy(r, scale * own) for r, own in zip(records, logs, strict=True)])
        for scale in (1, 0)
    )
    assert max(np.abs(a - b).max() for a, b in zip(weighed, plain, strict=True)) > 0.01, "the ratios should matter"
    for number, values in found.items():
        assert values == pytest.approx([0.0] * len(values) if number == 3 else weighed[number], abs=1e-5)


@pytest.mark.parametrize("name", ["grpo", "opob", "otb"])
def test_its_anchors_are_always_scored(name: str) -> None:
    """Where the update's own forward would do, the ratios would not be known before it."""
    [[mini]] = plan_step(rows(), seed=0, step=1, minibatches=1, data_size=1, micro_batch_rows=100)
    settings = config(**{**SETTINGS, "advantage": {"name": name}, "probe": {"every": 0}})
    anchors = Anchors(settings, "none", reads_minibatch=False)
    [part] = anchors.score(FakeLearner(Ranks(1), 0), TrainBatch(1, (mini,), {}, (0,)))
    assert bool(part.scores) == (name != "grpo")


def test_what_cannot_work_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("model: {checkpoint: none}\nadvantage: {name: opob}\n")
    load(file, [])
    for override, said in (
        (["sampling_mask.mode=off"], "distribution that each token was drawn from"),
        (["pipeline.mode=async", "pipeline.behavior=bypass"], "not known before the update"),
        (["kl.coef=0.1", "kl.where=reward"], "would lower them afterwards"),
    ):
        with pytest.raises(InvalidConfigError, match=said):
            load(file, override)
