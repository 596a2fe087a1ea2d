from __future__ import annotations

import math

import pytest
import torch

from moe_trm.batch.collate import collate
from moe_trm.batch.plan import plan_step
from moe_trm.config.schema import OptimizerConfig
from moe_trm.learner.protocol import Scores
from moe_trm.step.passes import AnchoredMinibatch
from moe_trm.step.rate_guard import RateGuard, sequence_weights
from moe_trm.types import TrainRow
from routing.record.sources import Native
from tests.unit.doubles import StandInLearner
from tests.unit.records import make_record


def minibatches(weights: list[float]) -> list[AnchoredMinibatch]:
    """Minibatches of rows whose ratio of policy to rollout is `weights`, spread over their tokens.

    The last micro-batch is padding.
    """
    rows = [TrainRow(make_record(sample_id=i, num_sampled=3 + i)) for i in range(len(weights))]
    [[first, second]] = plan_step(rows, seed=0, step=1, minibatches=2, data_size=1, micro_batch_rows=1)
    parts = []
    for mini in (first, second):
        batches = [collate(micro, keep_mask=False) for micro in mini.micro_batches]
        scores = []
        for micro, batch in zip(mini.micro_batches, batches, strict=True):
            record = micro.rows[0].record
            shift = math.log(weights[record.sample_id]) / record.num_sampled
            scores.append(Scores(torch.where(batch.mask, batch.rollout_logprobs + shift, 0.0)))
        parts.append(AnchoredMinibatch(mini, batches, scores, [Native()] * len(batches)))
    return parts


def test_weights_are_those_of_whole_rows() -> None:
    weights = sequence_weights(StandInLearner(), minibatches([1.0, 1.0, 1.0, 5.0]))
    assert sorted(weights.tolist()) == pytest.approx([0.2, 0.2, 0.2, 1.0], rel=1e-5)


@pytest.mark.parametrize(("form", "factor"), [("sqrt", 0.755929), ("linear", 0.571429)])
def test_the_effective_sample_size_lowers_the_rate(form: str, factor: float) -> None:
    guard = RateGuard(OptimizerConfig.model_validate({"ess_scale": form}))
    scale, metrics = guard.scale(StandInLearner(), minibatches([1.0, 1.0, 1.0, 5.0]), 10.0)
    assert scale == pytest.approx(factor, abs=1e-5)
    assert metrics["optimizer/eff_sample_size"] == pytest.approx(0.571429, abs=1e-5)
    assert metrics["optimizer/lr_scale"] == scale
    assert guard.scale(StandInLearner(), minibatches([3.0, 3.0]), 10.0)[0] == pytest.approx(1.0)


def test_without_guards_nothing_is_measured() -> None:
    assert RateGuard(OptimizerConfig()).scale(StandInLearner(), [], 10.0) == (1.0, {})


def test_a_surge_of_length_halves_the_rate_once_per_window() -> None:
    guard = RateGuard(OptimizerConfig(surge_limit=1.2, surge_window=3))
    lengths = [10, 10, 10, 13, 20, 20, 20, 20, 50, 50, 50]
    scales = [guard.scale(StandInLearner(), [], length)[0] for length in lengths]
    assert scales == [1, 1, 1, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25, 0.125, 0.125]
    resumed = RateGuard(OptimizerConfig(surge_limit=1.2, surge_window=3))
    resumed.restore(guard.state())
    assert [g.scale(StandInLearner(), [], 90)[0] for g in (guard, resumed)] == [0.125, 0.125]
