"""Golden values, groups in any order, and the degenerate groups."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_trm.advantages import by_row as adv
from moe_trm.advantages.by_name import GDPO, OUTCOME, REMAX, advantages_by_part, outcome_advantages
from moe_trm.advantages.compared import rewarded_samples
from moe_trm.errors import ConfigError, ControllerError
from moe_trm.methods.advantages import ADVANTAGES, BY_TOKEN
from tests.unit.records import make_record

R = np.array([1, 0, 1, 0, 0.5, 0.5])
G = np.array([7, 7, 7, 2, 2, 2])


def near(values: list[float]) -> Any:
    return pytest.approx(values, abs=1e-6)


def test_golden_outcome_advantages() -> None:
    assert adv.grpo(R, G) == near([0.577349, -1.154699, 0.577349, -1.154697, 0.577348, 0.577348])
    assert adv.rloo(R, G) == near([0.5, -1, 0.5, -0.5, 0.25, 0.25])
    lengths = np.array([4, 2, 6, 3, 3, 6])
    assert adv.opo(R, G, lengths) == near([0.166667, -0.833333, 0.166667, -0.375, 0.125, 0.125])
    assert adv.pass_at_k(R, G) == pytest.approx([0] * 6)
    assert adv.pass_at_k(np.array([1, 0, 0.5]), np.zeros(3, int)) == near([0.999998, 0, 0])
    assert adv.pass_at_k(np.array([0.2, 1.0, 0.5]), np.zeros(3, int), normalize_std=False) == pytest.approx([0, 0.5, 0])
    assert adv.grpo(R, G, normalize_std=False) == pytest.approx([1 / 3, -2 / 3, 1 / 3, -1 / 3, 1 / 6, 1 / 6])
    assert adv.gpg(R, G) == pytest.approx(np.array([1 / 3, -2 / 3, 1 / 3, -1 / 3, 1 / 6, 1 / 6]) * 6 / 4)


@given(st.lists(st.tuples(st.integers(0, 4), st.floats(-2, 2)), min_size=1, max_size=20), st.randoms())
def test_groups_may_be_interleaved(samples: list[tuple[int, float]], random: Random) -> None:
    ids, rewards = (np.array(column) for column in zip(*samples, strict=True))
    order = np.array(random.sample(range(len(ids)), len(ids)))
    for estimate in (adv.grpo, adv.rloo, adv.gpg):
        np.testing.assert_allclose(estimate(rewards, ids)[order], estimate(rewards[order], ids[order]), atol=1e-9)
    naive = np.zeros(len(ids))
    for i in range(len(ids)):
        others = rewards[(ids == ids[i]) & (np.arange(len(ids)) != i)]
        naive[i] = rewards[i] - others.mean() if len(others) else 0.0
    np.testing.assert_allclose(adv.rloo(rewards, ids), naive, atol=1e-9)


def test_degenerate_groups() -> None:
    same = np.full(3, 0.1)
    assert not adv.grpo(same, np.zeros(3, int)).any()
    assert not adv.rloo(same, np.zeros(3, int)).any()
    assert adv.grpo(np.array([0.7]), np.array([3])).tolist() == [0.7]
    assert adv.rloo(np.array([0.7]), np.array([3])).tolist() == [0.0]
    assert not adv.gpg(np.zeros(4), np.arange(4) // 2).any()
    for estimate in (adv.grpo, adv.rloo, adv.gpg):
        assert estimate(np.zeros(0), np.zeros(0, int)).shape == (0,)
    with pytest.raises(ConfigError, match="two best"):
        adv.pass_at_k(np.ones(3), np.array([0, 0, 1]))


LENGTHS = np.array([4, 2, 6, 3, 3, 60])


def test_a_lone_sample_gets_nothing_or_its_reward() -> None:
    """Groups of one beside a whole one: `reward` is what verl gives them."""
    rewards, groups = np.array([0.7, 1.0, 0.0, 0.5]), np.array([3, 1, 1, 2])
    lengths = np.array([2, 5, 1, 0])
    for name in OUTCOME:
        zero = outcome_advantages(name, rewards, groups, lengths, lone="zero")
        kept = outcome_advantages(name, rewards, groups, lengths, lone="reward")
        default = outcome_advantages(name, rewards, groups, lengths)
        if name in ("pass_at_k", "reinforce_plus_plus"):
            np.testing.assert_array_equal(zero, kept)
            continue
        np.testing.assert_array_equal(default, kept if name in ("grpo", "dr_grpo") else zero)
        if name == "reinforce_plus_plus_baseline":  # whitened over tokens: 0.7 twice, and 0.5 and -0.5 as before
            tokens = np.repeat([0.7, 0.5, -0.5], [2, 5, 1])
            expected = (0.7 - tokens.mean()) / np.sqrt(tokens.var(ddof=1) + 1e-8)
            assert kept[0] == pytest.approx(expected)
            continue
        assert zero[0] == zero[3] == 0, name
        assert kept[[0, 3]] == pytest.approx(np.array([0.7, 0.5]) * (4 / 3 if name == "gpg" else 1)), name
        np.testing.assert_array_equal(zero[1:3], kept[1:3])
    table = np.stack([rewards, 10 * rewards], axis=1)
    nothing = adv.gdpo(table, groups, np.ones(2), lengths, lone="zero")
    assert adv.gdpo(table, groups, np.ones(2), lengths)[0] != pytest.approx(nothing[0])


def test_gdpo_is_whitened_over_tokens() -> None:
    """A long answer counts as often as it has tokens, as in verl."""
    got = adv.gdpo(np.stack([R, R[::-1]], axis=1), G, np.array([2.0, 1.0]), LENGTHS)
    summed = 2 * adv.grpo(R, G) + adv.grpo(R[::-1], G)
    np.testing.assert_allclose(np.repeat(got, LENGTHS), adv.whiten(np.repeat(summed, LENGTHS)))
    assert np.repeat(got, LENGTHS).mean() == pytest.approx(0)
    assert abs(got.mean()) > 0.1


def test_gdpo_reads_named_rewards() -> None:
    """A small reward counts as much as one a hundred times larger; their sum would hide it."""
    parts = [{"right": 100 * float(r), "short": float(s)} for r, s in zip([1, 0, 1, 0], [0, 0, 1, 1], strict=True)]
    groups = np.zeros(4, int)
    lengths = np.array([4, 4, 4, 40])
    got = advantages_by_part(parts, groups, {}, lengths)
    table = np.array([[part["right"], part["short"]] for part in parts])
    np.testing.assert_allclose(got, adv.gdpo(table, groups, np.ones(2), lengths))
    assert got[0] == pytest.approx(got[3], abs=1e-4)
    assert got[2] > 1 > abs(got[0])
    only = advantages_by_part(parts, groups, {"right": 0.0}, lengths)
    np.testing.assert_allclose(only, adv.whiten_rows(adv.grpo(table[:, 1], groups), lengths))
    unlike: list[list[dict[str, float]]] = [[{}, {}], [{"a": 1.0}, {"b": 1.0}]]
    for broken in unlike:
        samples = [replace(make_record(sample_id=i), reward_parts=part) for i, part in enumerate(broken)]
        with pytest.raises(ControllerError, match="named rewards"):
            rewarded_samples("gdpo", samples)


def test_a_sample_without_a_reward_is_refused_and_never_counts_as_zero() -> None:
    with pytest.raises(ControllerError, match="has no reward"):
        rewarded_samples("grpo", [make_record(), replace(make_record(sample_id=1), reward=None)])


def test_reinforce_plus_plus_is_whitened_over_tokens() -> None:
    """Against every token by itself, in NumPy."""
    lengths = np.array([2, 5, 1])
    tokens = np.repeat([1.0, 0.0, 0.5], lengths)
    got = np.repeat(adv.reinforce_plus_plus(np.array([1.0, 0.0, 0.5]), lengths), lengths)
    np.testing.assert_allclose(got, (tokens - tokens.mean()) / np.sqrt(tokens.var(ddof=1) + 1e-8))
    centered = np.repeat([0.5, -0.5, 0.0], lengths)
    got = np.repeat(adv.reinforce_plus_plus_baseline(np.array([1.0, 0, 3]), np.array([0, 0, 1]), lengths), lengths)
    np.testing.assert_allclose(got, (centered - centered.mean()) / np.sqrt(centered.var(ddof=1) + 1e-8))


def test_every_estimator_by_name_is_the_function_it_names() -> None:
    assert set(ADVANTAGES) == {*OUTCOME, GDPO, REMAX, *BY_TOKEN, "opob"}
    lengths = np.array([4, 2, 6, 3, 3, 6])
    expected = {
        "grpo": adv.grpo(R, G),
        "dr_grpo": adv.grpo(R, G, normalize_std=False),
        "rloo": adv.rloo(R, G),
        "opo": adv.opo(R, G, lengths),
        "gpg": adv.gpg(R, G),
        "pass_at_k": adv.pass_at_k(R, G),
    }
    for name, values in expected.items():
        np.testing.assert_array_equal(outcome_advantages(name, R, G, lengths), values)
    plain = outcome_advantages("reinforce_plus_plus", R, G, lengths)
    np.testing.assert_array_equal(plain, adv.reinforce_plus_plus(R, lengths))
    baseline = outcome_advantages("reinforce_plus_plus_baseline", R, G, lengths)
    np.testing.assert_array_equal(baseline, adv.reinforce_plus_plus_baseline(R, G, lengths))


def test_remax_against_a_loop_and_its_gradient() -> None:
    """E[A grad log p] does not depend on the baseline: by enumeration of a softmax over three answers."""
    rewards, baselines = np.array([1.0, 0.0, -2.0, 0.5]), np.array([0.25, 0.25, 1.0, 0.5])
    expected = [reward - baseline for reward, baseline in zip(rewards, baselines, strict=True)]
    np.testing.assert_array_equal(
        outcome_advantages("remax", rewards, G[:4], np.ones(4), baselines=baselines), expected
    )
    probs, of_answer = np.array([0.5, 0.3, 0.2]), np.array([1.0, 0.0, 0.5])
    scores = np.eye(3) - probs
    plain = (probs * of_answer) @ scores
    with_baseline = (probs * adv.remax(of_answer, np.full(3, of_answer[probs.argmax()]))) @ scores
    np.testing.assert_allclose(with_baseline, plain, atol=1e-15)


def test_pass_at_k_of_a_lonely_survivor_is_nothing() -> None:
    got = outcome_advantages("pass_at_k", np.array([1.0, 0.0, 1.0]), np.array([0, 0, 1]), np.ones(3))
    assert got[0] > 0
    assert got[1:].tolist() == [0.0, 0.0]
