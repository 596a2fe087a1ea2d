"""The evidence about rules: ratios of known divergence, flips of known rates, and thresholds at an age."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.evidence import length
from benchmarks.evidence.budget import sampler, weights, words_for
from benchmarks.evidence.calibrate import mean_age, thresholds
from benchmarks.evidence.chain import Divergence, softmax
from benchmarks.evidence.collapse import Course, Setting, area, direction, logistic, train
from benchmarks.evidence.flip_depth import BASE, compared, independent, regrouped
from benchmarks.evidence.tasks import reasoning
from moe_trm.errors import ConfigError
from moe_trm.recording.scores import ScoredBatch, ScoredUpdate


@pytest.mark.parametrize("shape", length.SHAPES)
def test_made_ratios_have_the_divergence_they_are_made_for(shape: str) -> None:
    log_ratios = length.SHAPES[shape](4000, 64, torch.Generator().manual_seed(0))
    ratios = log_ratios.exp()
    assert float(ratios.mean()) == pytest.approx(1, abs=1e-3)
    assert float((ratios - 1 - log_ratios).mean()) == pytest.approx(length.TOKEN_KL, rel=0.1)


def test_a_maximum_rejects_long_rows_and_a_mean_short_ones() -> None:
    worst, average = (length.kept_by_length(rule, {}, length.spread, 400, 0) for rule in ("trm_max", "trm_avg"))
    assert np.mean(worst) == pytest.approx(1 - length.REJECTED, abs=0.005)
    assert np.mean(average) == pytest.approx(1 - length.REJECTED, abs=0.005)
    assert worst[0] > 0.97 > worst[-1]
    assert average[-1] > 0.97 > average[0]


def test_flips_of_layers_that_do_not_know_of_one_another() -> None:
    assert independent(np.array([0.5, 0.5, 0.0])) == pytest.approx(0.75)
    found = compared(replace(BASE, layers=3), "bfloat16", seed=0, rows=2)
    assert found.num_token_layers == 2 * 64 * 3
    assert 0 < found.per_layer.max() <= found.token_any_layer_rate <= found.per_layer.sum()


def test_a_row_meets_the_same_experts_alone_and_together_up_to_rounding() -> None:
    found = regrouped(replace(BASE, layers=2), "float32", seed=0, rows=3)
    assert found.num_token_layers == 3 * 64 * 2
    assert found.token_layer_rate < 0.01, "another order of rows would differ nearly everywhere"


def update(age: int, seed: int) -> ScoredUpdate:
    """16 rows of 8 tokens, sampled `age` versions before version 9; half have negative advantages."""
    generator = torch.Generator().manual_seed(seed)
    mask, zero = torch.ones(16, 8, dtype=torch.bool), torch.zeros(16, 8)
    rollout = -torch.rand(16, 8, generator=generator)
    batch = ScoredBatch(
        mask=mask,
        rollout_logprobs=rollout,
        current_logprobs=rollout,
        advantages=torch.tensor([1.0, -1.0]).repeat(8)[:, None].expand(16, 8),
        turn_ids=zero.long(),
        versions=zero.long() + 9 - age,
        sample_ids=torch.arange(16),
        group_ids=torch.zeros(16, dtype=torch.int64),
        rewards=torch.zeros(16),
        anchor_logprobs=rollout + 0.1 * age * torch.randn(16, 8, generator=generator),
    )
    return ScoredUpdate((batch,), 16, 128, recovery="merged", version=9)


def test_thresholds_are_of_the_steps_that_are_old_enough() -> None:
    steps = {1: [update(0, 1)], 2: [update(8, 2), update(8, 3)]}
    assert (mean_age(steps[1]), mean_age(steps[2])) == (0, 8)
    found = {str(row["rule"]): row for row in thresholds(steps, 8, 0.25)}
    assert {row["steps"] for row in found.values()} == {"2 to 2"}
    assert found["trm_max"]["rows_judged"] == 32
    # The policy that rules read is that of the step's start: the update's own forward equals the rollout here.
    assert float(str(found["trm_max"]["threshold"]).removeprefix("max_kl=")) > 0.1
    for name in ("trm_max", "trm_avg", "ln_trm"):
        rejected = float(found[name]["rejected_positive"]) + float(found[name]["rejected_negative"])
        assert rejected / 2 == pytest.approx(0.25, abs=0.04), name
    assert found["opsm"]["rows_judged"] == 16
    assert found["opsm"]["rejected_positive"] == 0
    with pytest.raises(ConfigError, match="no step of this recording has samples that old"):
        list(thresholds({1: [update(2, 1)]}, 8, 0.25))


@pytest.mark.parametrize("token_kl", [1e-4, 1e-2, 0.5])
def test_a_sampler_is_as_far_away_as_asked(token_kl: float) -> None:
    chain, logits = reasoning(0, 8)
    mu = sampler(chain, logits, np.random.default_rng(1).normal(size=logits.shape), token_kl)
    assert Divergence.between(chain, mu, softmax(logits)).token_kl == pytest.approx(token_kl, rel=0.05)
    assert (sampler(chain, logits, logits, 0.0) == softmax(logits)).all()


def test_weights_of_the_budget_and_words_for_its_gains() -> None:
    log_ratios = np.random.default_rng(0).normal(size=(40, 8)) * 0.5
    assert (weights("none", log_ratios) == 1).all()
    assert weights("token", log_ratios).max() == 2
    assert weights("masked", log_ratios).all(1).sum() == 36
    assert [words_for(0.1, 0.2), words_for(-0.2, -0.1), words_for(-0.001, 0.002), words_for(-0.1, 0.002)] == [
        "gains", "loses", "not shown, and below 0.01", "not shown",
    ]  # fmt: skip


def test_area_under_the_curve_and_a_regression_that_finds_the_line() -> None:
    labels = np.array([False, True, False, True])
    assert area(np.array([1.0, 2.0, 3.0, 4.0]), labels) == 0.75
    assert area(np.array([0.0, 0.0, 0.0, 0.0]), labels) == 0.5
    assert np.isnan(area(np.zeros(2), np.array([True, True])))
    falling = -np.array([1.0, 2.0, 3.0, 4.0])
    assert (direction(falling, labels), direction(-falling, labels)) == (-1, 1)
    assert area(direction(falling, labels) * falling, labels) == 0.75
    values = np.random.default_rng(0).normal(size=(200, 2))
    predict = logistic(values, values[:, 0] - values[:, 1] > 0)
    assert area(predict(values), values[:, 0] - values[:, 1] > 0) > 0.99


def test_moments_end_where_the_run_has_collapsed() -> None:
    rewards = np.concatenate([np.linspace(0.2, 0.8, 40), np.full(60, 0.1)])
    course = Course(rewards, np.arange(25 * 6, dtype=float).reshape(25, 6))
    labels = [label for _, label in course.moments()]
    # Updates 20 to 200 stand above the fall at 205; all see it within 200, and later ones do not count.
    assert course.collapsed
    assert labels == [True] * 10
    calm = Course(np.linspace(0.2, 0.8, 100), np.zeros((25, 6)))
    assert not calm.collapsed
    assert [label for _, label in calm.moments()] == [False] * 10
    dip = np.concatenate([np.full(40, 0.8), np.full(15, 0.1), np.full(45, 0.8)])
    assert not Course(dip, np.zeros((25, 6))).collapsed, "it recovered within 100 updates"


def test_a_run_that_may_collapse_takes_its_figures() -> None:
    fresh, stale = (train(Setting(8, 0.1, lag, "token"), 0, updates=40) for lag in (1, 40))
    assert fresh.figures.shape == (2, 6)
    assert fresh.figures[0, 0] == 1, "the sampler is the policy"
    assert stale.figures[-1, 0] < 1
    assert stale.figures[-1, 2] > 0
    assert len(fresh.rewards) == 8
