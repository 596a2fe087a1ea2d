"""Golden values, groups in any order, and the degenerate groups."""

from __future__ import annotations

from random import Random
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_trm.batch import advantages as adv
from moe_trm.batch import token_advantages as token_adv
from moe_trm.batch.outcome import GDPO, OUTCOME, advantages_by_part, outcome_advantages
from moe_trm.config.schema import AdvantageConfig
from moe_trm.errors import ConfigError, ControllerError

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
    assert adv.remax(R, R[::-1]) == pytest.approx(R - R[::-1])
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
        with pytest.raises(ControllerError, match="named rewards"):
            advantages_by_part(broken, np.zeros(2, int), {}, np.ones(2, int))


def test_golden_gae_skips_tool_tokens() -> None:
    rewards, values = np.array([[0, 0, np.nan, 1.0]]), np.array([[0.2, 0.4, np.nan, 0.5]])
    mask = np.array([[True, True, False, True]])
    advantages, returns = token_adv.gae(rewards, values, mask, gamma=1.0, lam=0.95)
    assert advantages[0].tolist() == pytest.approx([0.74625, 0.575, 0, 0.5])
    assert returns[0].tolist() == pytest.approx([0.94625, 0.975, 0, 1.0])


OTB_MASK = np.array([[1, 1, 1, 0], [1, 1, 0, 0]], bool)


def otb_case(columns: list[int]) -> np.ndarray:
    rewards = np.zeros((2, 4))
    rewards[0, 2] = 1.0
    probs = np.array([[0.5, 0.9, 0.2, 0], [0.4, 0.6, 0, 0]])
    squares = np.array([[0.4, 0.82, 0.3, 0], [0.35, 0.5, 0, 0]])
    wide = [np.full((2, 6), np.nan) for _ in range(3)]
    mask = np.zeros((2, 6), bool)
    for target, source in zip([*wide, mask], [rewards, probs, squares, OTB_MASK], strict=True):
        target[:, columns] = source
    return token_adv.otb(wide[0], np.zeros(2, int), mask, wide[1], wide[2])[:, columns]


@pytest.mark.parametrize("columns", [[0, 1, 2, 3], [0, 2, 3, 5], [1, 2, 4, 5]])
def test_golden_otb_and_its_tool_form(columns: list[int]) -> None:
    expected = [[0.578947, 0.669291, 1.0, 0], [-0.421053, -0.330709, 0, 0]]
    np.testing.assert_allclose(otb_case(columns), expected, atol=1e-6)


def test_reinforce_plus_plus_whitens_over_sampled_tokens() -> None:
    mask = np.array([[1, 0, 1], [1, 1, 0]], bool)
    rewards = np.array([[0, np.nan, 1.0], [0.5, 0, np.nan]])
    go = token_adv.rewards_to_go(rewards, mask, gamma=0.5)
    np.testing.assert_allclose(go, [[0.5, 0, 1], [0.5, 0, 0]])
    got = token_adv.reinforce_plus_plus(rewards, mask, gamma=0.5)
    x = np.array([0.5, 1, 0.5, 0])
    np.testing.assert_allclose(got[mask], (x - x.mean()) / np.sqrt(x.var(ddof=1) + 1e-8))
    assert not got[~mask].any()
    baseline = token_adv.reinforce_plus_plus_baseline(np.array([1.0, 0.0]), np.zeros(2, int), mask)
    assert baseline[mask].mean() == pytest.approx(0)
    assert not baseline[~mask].any()


def test_every_estimator_by_name_is_the_function_it_names() -> None:
    assert set(get_args(AdvantageConfig.model_fields["name"].annotation)) == {*OUTCOME, GDPO}
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
    mask = np.arange(6) < lengths[:, None]
    last = np.where(np.arange(6) == lengths[:, None] - 1, R[:, None], 0.0)
    tokens = token_adv.reinforce_plus_plus(last, mask)
    np.testing.assert_allclose(outcome_advantages("reinforce_plus_plus", R, G, lengths)[:, None] * mask, tokens)
    tokens = token_adv.reinforce_plus_plus_baseline(R, G, mask)
    rows = outcome_advantages("reinforce_plus_plus_baseline", R, G, lengths)
    np.testing.assert_allclose(rows[:, None] * mask, tokens)


def test_pass_at_k_of_a_lonely_survivor_is_nothing() -> None:
    got = outcome_advantages("pass_at_k", np.array([1.0, 0.0, 1.0]), np.array([0, 0, 1]), np.ones(3))
    assert got[0] > 0
    assert got[1:].tolist() == [0.0, 0.0]
