"""From configuration to losses: the same numbers however ranks and micro-batches share the minibatch."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch

from moe_trm import corrections, losses
from moe_trm.advantages.by_row import grpo
from moe_trm.advantages.compared import rewarded_samples
from moe_trm.batch.collate import collate
from moe_trm.batch.plan import plan_step
from moe_trm.config.schema import Config
from moe_trm.errors import ConfigError
from moe_trm.learner.protocol import Scores
from moe_trm.losses.kl import kl_term
from moe_trm.methods.parameters import declared
from moe_trm.ratios import LogRatios
from moe_trm.step.advantages import own_records
from moe_trm.step.objective import Objective
from moe_trm.step.passes import AnchoredMinibatch
from moe_trm.step.reference import Reference
from moe_trm.types import MicroBatch, MiniBatch
from routing.record.sources import Native
from tests.unit.advantages import estimator
from tests.unit.step.shared_minibatch import (
    FakeLearner,
    Ranks,
    anchor_logprobs,
    assert_same,
    config,
    current_logprobs,
    one_update,
    outcome,
    reference_logprobs,
    rows,
)

WHOLE: dict[str, dict[str, Any]] = {
    "m2po": {
        "correction": {"rules": [{"name": "m2po", "thresholds": {"budget": 0.02}}]},
        "loss": {"name": "unclipped"},
    },
    "normalised by token": {"correction": {"preset": "decoupled_token_is", "batch_normalize": "token"}},
    "normalised by row": {"correction": {"preset": "decoupled_seq_is", "batch_normalize": "sequence"}},
    "kl_cov": {"loss": {"name": "kl_cov", "parameters": {"share": 0.2}}},
    "clip_cov": {"loss": {"name": "clip_cov", "parameters": {"share": 0.1, "low": 0.0, "high": 9.0, "seed": 3}}},
    "m2po_clip": {"loss": {"name": "m2po_clip", "parameters": {"budget": 0.01, "min_low": 0, "min_high": 0}}},
    "oapl": {"loss": {"name": "oapl"}, "correction": {"rules": [{"name": "trm_max", "thresholds": {"max_kl": 0.2}}]}},
    "dpo": {"loss": {"name": "dpo"}, "correction": {"rules": [{"name": "trm_max", "thresholds": {"max_kl": 0.2}}]}},
    "quatro_query": {"loss": {"name": "quatro_query", "parameters": {"budget": 0.05}}},
    "r2vpo_clip": {
        "loss": {"name": "r2vpo_clip"},
        "correction": {"rules": [{"name": "trm_max", "thresholds": {"max_kl": 0.2}}]},
    },
    "turns": {"loss": {"name": "turn_ppo", "parameters": {"turn_ratio": "product", "normalize": "row"}}},
    "kl in the loss": {"kl": {"coef": 0.3, "estimator": "k3_is"}},
    "kl to the rollout": {"kl": {"coef": 0.3, "estimator": "k3_is", "clip": 0.1}, "loss": {"rollout_kl_coef": 0.2}},
    "kl in the reward": {"kl": {"coef": 0.3, "where": "reward"}, "batch": {"overlong": "mask"}},
    "entropy": {"loss": {"entropy_coef": 0.1, "name": "espo"}},
    "by parts": {"correction": {"rules": [{"name": "opsm", "thresholds": {"delta": 0.01}}, {"name": "icepop"}]}},
}


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("name", WHOLE)
def test_ranks_and_micro_batches_change_nothing(name: str, first: bool) -> None:
    """One rank with everything at once, against two ranks with many micro-batches, the last of them empty."""
    settings = config(**WHOLE[name])
    whole = outcome(settings, ranks=1, micro_batch_rows=100, first=first)
    parts = outcome(settings, ranks=2, micro_batch_rows=2, first=first)
    uneven = outcome(settings, ranks=3, micro_batch_rows=3, first=first)
    assert_same(whole, parts)
    assert_same(whole, uneven)
    assert any(float(gradient.abs().sum()) > 0 for gradient in whole["gradients"].values())


@pytest.mark.parametrize("repeats", [True, False])
def test_bits_are_compared_where_the_learner_repeats_them(repeats: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeLearner, "repeats_passes", repeats)
    metrics = outcome(config(), ranks=1, micro_batch_rows=100, first=True)["metrics"]
    fractions = {name: value for name, value in metrics.items() if name.startswith("update/first_")}
    name = "update/first_nonzero_fraction" if repeats else "update/first_reordered_fraction"
    assert [*fractions] == [name]


def test_a_loss_of_the_whole_minibatch_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compute, sizes = losses.BoundLoss.__call__, list[int]()

    def counted(bound: losses.BoundLoss, inputs: losses.LossInputs) -> losses.TokenLoss:
        sizes.append(len(inputs.keep))
        return compute(bound, inputs)

    monkeypatch.setattr(losses.BoundLoss, "__call__", counted)
    outcome(config(loss={"name": "kl_cov"}), ranks=1, micro_batch_rows=2)
    assert [size for size in sizes if size] == [12]


@pytest.mark.parametrize("estimator", ["k1", "abs", "k2", "k3", "k1+", "k3+", "k3_is"])
def test_the_kl_term_is_the_mean_over_tokens_beside_the_policy_loss(estimator: str) -> None:
    rejecting = {"rules": [{"name": "trm_max", "thresholds": {"max_kl": 0.1}}]}
    plain = outcome(config(correction=rejecting), ranks=1, micro_batch_rows=4)
    pulled = outcome(
        config(correction=rejecting, kl={"coef": 0.3, "estimator": estimator}), ranks=1, micro_batch_rows=4
    )
    assert pulled["metrics"]["correction/kept_fraction"] < 1
    [[mini]] = plan_step(rows(), seed=0, step=1, minibatches=1, data_size=1, micro_batch_rows=100)
    batch = collate(mini.micro_batches[0], keep_mask=False)
    current, reference = current_logprobs(batch), reference_logprobs(batch)
    ratios = LogRatios(batch.rollout_logprobs, anchor_logprobs(batch), current, batch.mask)
    expected = 0.3 * float(kl_term(estimator, ratios, current, reference)[batch.mask].mean())
    assert pulled["metrics"]["loss/kl"] == pytest.approx(expected, rel=1e-5)
    assert pulled["metrics"]["loss/policy"] == plain["metrics"]["loss/policy"]
    assert pulled["loss"] == pytest.approx(plain["loss"] + expected, rel=1e-5)
    x = (current - reference)[batch.mask].double()
    assert pulled["metrics"]["reference/k1_kl"] == pytest.approx(float(x.mean()), rel=1e-5)
    assert pulled["metrics"]["reference/k3_kl"] == pytest.approx(float(((-x).expm1() + x).mean()), rel=1e-5)
    assert pulled["metrics"]["kl/coef"] == 0.3


@pytest.mark.parametrize("ratio", ["total", "update"])
def test_the_weight_of_the_unbiased_kl_is_a_choice(ratio: str) -> None:
    """slime and miles weigh by current / proximal, here by current / rollout unless told so."""
    got = outcome(config(kl={"coef": 0.3, "estimator": "k3_is", "ratio": ratio}), ranks=1, micro_batch_rows=4)
    [[mini]] = plan_step(rows(), seed=0, step=1, minibatches=1, data_size=1, micro_batch_rows=100)
    batch = collate(mini.micro_batches[0], keep_mask=False)
    current, reference = current_logprobs(batch), reference_logprobs(batch)
    earlier = {"total": batch.rollout_logprobs, "update": anchor_logprobs(batch)}[ratio]
    x = current - reference
    expected = 0.3 * float(((current - earlier).exp() * ((-x).expm1() + x))[batch.mask].mean())
    assert got["metrics"]["loss/kl"] == pytest.approx(expected, rel=1e-5)


def test_the_kl_to_the_rollout_is_the_mean_over_tokens_whatever_is_rejected() -> None:
    """Beside another rule: rejected tokens are pulled, too, by their log-ratio over the number of tokens."""
    rejecting = {"rules": [{"name": "trm_max", "thresholds": {"max_kl": 0.1}}]}
    plain = outcome(config(correction=rejecting), ranks=1, micro_batch_rows=4)
    pulled = outcome(config(correction=rejecting, loss={"rollout_kl_coef": 0.3}), ranks=1, micro_batch_rows=4)
    assert pulled["metrics"]["correction/kept_fraction"] == plain["metrics"]["correction/kept_fraction"] < 1
    [[mini]] = plan_step(rows(), seed=0, step=1, minibatches=1, data_size=1, micro_batch_rows=100)
    batch = collate(mini.micro_batches[0], keep_mask=False)
    x = (current_logprobs(batch) - batch.rollout_logprobs).double()
    expected = 0.3 * float((x**2 / 2)[batch.mask].mean())
    assert pulled["metrics"]["loss/rollout_kl"] == pytest.approx(expected, rel=1e-5)
    assert pulled["loss"] == pytest.approx(plain["loss"] + expected, rel=1e-5)
    assert "loss/rollout_kl" not in plain["metrics"]
    for i, row in enumerate(mini.micro_batches[0].rows):
        number = row.record.sample_id
        moved = pulled["gradients"][number] - plain["gradients"][number]
        own = 0.3 * x[i][batch.mask[i]] / int(batch.mask.sum())
        torch.testing.assert_close(moved.double(), own, rtol=1e-4, atol=1e-7)


def test_the_clipped_weight_reaches_the_loss() -> None:
    found = {
        clip: outcome(config(kl={"coef": 0.3, "estimator": "k3_is", "clip": clip}), ranks=1, micro_batch_rows=4)
        for clip in (None, 0.05)
    }
    assert found[0.05]["metrics"]["loss/kl"] < found[None]["metrics"]["loss/kl"]


def lowered(settings: Config, learner: FakeLearner, part: AnchoredMinibatch) -> list[AnchoredMinibatch]:
    """The minibatch as a step with this KL hands it to the update."""
    reference = Reference(settings, learner)
    scored = reference.add_logprobs(learner, [part])
    compared = rewarded_samples(settings.advantage.name, own_records(scored))
    return estimator(settings).add_advantages(learner, scored, (compared,), reference.kl_penalties(scored))


@pytest.mark.parametrize("estimate", ["k1", "k2", "k3"])
def test_kl_in_the_reward_changes_the_advantages_and_nothing_else(estimate: str) -> None:
    settings = config(kl={"coef": 0.3, "where": "reward", "estimator": estimate})
    [[mini]] = plan_step(rows(), seed=0, step=1, minibatches=1, data_size=1, micro_batch_rows=5)
    batches = [collate(micro, keep_mask=False) for micro in mini.micro_batches]
    part = AnchoredMinibatch(
        mini, batches, [Scores(anchor_logprobs(batch)) for batch in batches], [Native()] * len(batches)
    )
    learner = FakeLearner(Ranks(1), 0)
    [shaped] = lowered(settings, learner, part)
    assert shaped.kl_coef == 0.0
    rewards, groups, got = [], [], []
    for micro, batch, new in zip(mini.micro_batches, batches, shaped.batches, strict=True):
        x = (anchor_logprobs(batch) - reference_logprobs(batch)).double()
        penalty = {"k1": x, "k2": x**2 / 2, "k3": (-x).exp() - 1 + x}[estimate].sum(dim=1)
        rewards += [(row.record.reward or 0.0) - 0.3 * float(kl) for row, kl in zip(micro.rows, penalty, strict=True)]
        groups += [row.record.group_id for row in micro.rows]
        assert torch.equal(new.advantages != 0, batch.mask)
        got += [float(values[kept][0]) for values, kept in zip(new.advantages, batch.mask, strict=True)]
    np.testing.assert_allclose(got, grpo(np.array(rewards), np.array(groups)), rtol=1e-4)


@pytest.mark.parametrize("lone", ["reward", "zero"])
def test_kl_in_the_reward_heeds_what_a_lone_sample_gets(lone: str) -> None:
    """Four rows of one prompt and one row that is alone."""
    settings = config(kl={"coef": 0.3, "where": "reward"}, advantage={"name": "rloo", "lone_sample": lone})
    micro = MicroBatch(tuple(rows()[:5]))
    batch = collate(micro, keep_mask=False)
    part = AnchoredMinibatch(MiniBatch((micro,), 5, 1), [batch], [Scores(anchor_logprobs(batch))], [Native()])
    learner = FakeLearner(Ranks(1), 0)
    [shaped] = lowered(settings, learner, part)
    [advantages] = [item.advantages for item in shaped.batches]
    assert bool(advantages[4].any()) == (lone == "reward")
    assert advantages[:4].any()


def test_an_adaptive_coefficient_follows_the_k3_of_all_tokens() -> None:
    """By a loop over tokens; a target far away changes it by a fifth at most."""
    batch = collate(MicroBatch(tuple(rows())), keep_mask=False)
    log_ratios = (current_logprobs(batch) - reference_logprobs(batch))[batch.mask].tolist()
    k3 = fmean(math.exp(-x) - 1 + x for x in log_ratios)
    for target, error in ((k3 / 1.1, 0.1), (k3 / 0.85, -0.15), (1e-6, 0.2)):
        kl = {"coef": 0.2, "controller": "adaptive", "target": target, "horizon": 120}
        got = outcome(config(kl=kl), ranks=2, micro_batch_rows=4, steps=3)
        assert got["metrics"]["kl/coef"] == pytest.approx(0.2 * (1 + error / 10) ** 2)
    resumed = Reference(config(kl=kl), FakeLearner(Ranks(1), 0))
    resumed.restore({"coef": 0.7})
    assert resumed.state() == {"coef": 0.7}


def test_the_entropy_bonus_pulls_every_sampled_token_alike() -> None:
    rejecting = {"rules": [{"name": "trm_max", "thresholds": {"max_kl": 0.1}}]}
    got = outcome(config(correction=rejecting, loss={"entropy_coef": 0.1}), ranks=1, micro_batch_rows=4)
    num_tokens = sum(row.record.num_sampled for row in rows())
    for gradient in got["entropy_gradients"].values():
        torch.testing.assert_close(gradient, torch.full_like(gradient, -0.1 / num_tokens))
    assert got["metrics"]["loss/entropy"] == pytest.approx(-0.1 * got["metrics"]["policy/entropy"], rel=1e-5)
    measured = outcome(config(loss={"measure_entropy": True}), ranks=1, micro_batch_rows=4)
    assert measured["metrics"]["policy/entropy"] == got["metrics"]["policy/entropy"]
    assert "loss/entropy" not in measured["metrics"]
    assert not any(gradient.any() for gradient in measured["entropy_gradients"].values())


def test_normalised_weights_have_mean_one() -> None:
    got = outcome(config(**WHOLE["normalised by token"]), ranks=2, micro_batch_rows=2)
    assert got["metrics"]["correction/weight_mean"] == pytest.approx(1.0, rel=1e-6)


def test_what_is_rejected_does_not_raise_the_weight_of_the_rest() -> None:
    """Normalisation is by the mean of the weights before rejection: each gradient is the normalised one, or 0."""
    plain = outcome(config(**WHOLE["normalised by token"]), ranks=1, micro_batch_rows=4)
    trm = {"name": "trm_avg", "thresholds": {"mean_kl": 0.1}}
    both = {**WHOLE["normalised by token"]["correction"], "rules": [trm]}
    rejecting = outcome(config(correction=both), ranks=1, micro_batch_rows=4)
    assert 0 < rejecting["metrics"]["correction/kept_fraction"] < 1
    for sample, gradient in rejecting["gradients"].items():
        if gradient.any():
            torch.testing.assert_close(gradient, plain["gradients"][sample])


@pytest.mark.parametrize("name", corrections.presets)
def test_every_preset_works_by_name(name: str) -> None:
    got = outcome(config(correction={"preset": name}), ranks=1, micro_batch_rows=4)
    for rule, _ in corrections.presets[name].rules:
        assert f"correction/{rule}/kept_fraction" in got["metrics"]
    again = outcome(config(correction={"preset": name}), ranks=1, micro_batch_rows=4)
    assert again["metrics"] == got["metrics"]


@pytest.mark.parametrize("name", losses.names())
def test_every_loss_works_by_name(name: str) -> None:
    needed, _ = declared(losses.get(name).function)
    parameters = dict.fromkeys(needed, 0.1)
    got = outcome(config(loss={"name": name, "parameters": parameters}), ranks=1, micro_batch_rows=4)
    assert np.isfinite(got["loss"])
    assert any(float(gradient.abs().sum()) > 0 for gradient in got["gradients"].values())


def test_bypass_reads_the_total_ratio_and_brings_its_loss() -> None:
    preset = outcome(config(correction={"preset": "bypass_ppo_clip"}), ranks=1, micro_batch_rows=4)
    by_hand = outcome(config(loss={"name": "ppo_clip", "parameters": {"ratio": "total"}}), ranks=1, micro_batch_rows=4)
    plain = outcome(config(), ranks=1, micro_batch_rows=4)
    assert preset["loss"] == by_hand["loss"] != plain["loss"]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"loss": {"name": "gspo"}, "correction": {"preset": "bypass_pg_is"}}, "own loss"),
        ({"loss": {"name": "gpg", "clip_low": 0.1}}, "clip_low"),
        ({"loss": {"clip_low": 0.1, "parameters": {"clip_low": 0.2}}}, "twice"),
        ({"correction": {"rules": [{"name": "m2po", "target_reject_rate": 0.1}]}}, "cannot be calibrated"),
        (
            {"correction": {"rules": [{"name": "trm_max", "thresholds": {"max_kl": 1.0}, "target_reject_rate": 0.1}]}},
            "either given or chosen",
        ),
        (
            {
                "correction": {
                    "preset": "decoupled_geo_rs",
                    "rules": [{"name": "seq_mean_k1", "thresholds": {"low": 0.5, "high": 2.0, "ratio": "merged"}}],
                }
            },
            "more than once",
        ),
        ({"correction": {"batch_normalize": "token"}}, "no weights"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_at_launch(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Objective(config(**settings))


CALIBRATED: dict[str, Any] = {
    "correction": {
        "calibration_steps": 2,
        "rules": [
            {"name": "trm_max", "target_reject_rate": 0.25},
            {"name": "token_k2", "target_reject_rate": 0.1},
        ],
    }
}


def test_a_target_reject_rate_is_measured_then_frozen_and_kept(tmp_path: Path) -> None:
    settings, mini = (
        config(**CALIBRATED),
        plan_step(rows(), seed=0, step=1, minibatches=1, data_size=1, micro_batch_rows=5),
    )
    learner, objective = FakeLearner(Ranks(1), 0), Objective(settings, tmp_path)
    measured = one_update(objective, learner, mini[0][0], first=False)["metrics"]
    assert measured["correction/kept_fraction"] == 1.0
    assert objective.state(learner)["thresholds"]["chosen"] == {}
    last = one_update(objective, learner, mini[0][0], first=False)["metrics"]
    assert last["correction/kept_fraction"] == 1.0
    after = one_update(objective, learner, mini[0][0], first=False)["metrics"]
    assert 0.75 <= after["correction/trm_max/kept_sequence_fraction"] < 0.9
    assert after["correction/token_k2/kept_fraction"] == pytest.approx(0.9, abs=0.02)
    kept = json.loads((tmp_path / "thresholds.json").read_text())
    state = objective.state(learner)
    assert state["thresholds"]["chosen"] == kept
    assert after["correction/trm_max/threshold_max_kl"] == kept["trm_max"]["max_kl"]
    resumed = Objective(settings)
    resumed.restore(state, learner)
    assert one_update(resumed, learner, mini[0][0], first=False)["metrics"] == after


def test_a_run_resumed_while_it_measures_freezes_the_same_thresholds() -> None:
    mini = plan_step(rows(), seed=0, step=1, minibatches=1, data_size=1, micro_batch_rows=5)[0][0]
    learner, whole, first, second = FakeLearner(Ranks(1), 0), *(Objective(config(**CALIBRATED)) for _ in range(3))
    expected = [one_update(whole, learner, mini, first=False)["metrics"] for _ in range(3)]
    one_update(first, learner, mini, first=False)
    second.restore(first.state(learner), learner)
    assert [one_update(second, learner, mini, first=False)["metrics"] for _ in range(2)] == expected[1:]


def test_ranks_freeze_the_same_thresholds() -> None:
    one = outcome(config(**CALIBRATED), ranks=1, micro_batch_rows=100, steps=3)
    two = outcome(config(**CALIBRATED), ranks=2, micro_batch_rows=2, steps=3)
    assert_same(one, two)
    assert one["metrics"]["correction/kept_fraction"] < 1
