"""Proxies of the gradient's variance: against the score norms of a small softmax, and by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from moe_trm import corrections, diagnostics
from moe_trm.advantages.by_name import explained_variance
from moe_trm.corrections import Evidence
from moe_trm.diagnostics import gradient_noise, gradient_power
from moe_trm.ratios import LogRatios

POWER = "variance/total_power"


def power(evidence: Evidence, *rules: tuple[str, dict[str, Any]]) -> float:
    bound = [corrections.get(name).bind(**thresholds) for name, thresholds in rules]
    return diagnostics.finalize(gradient_power(evidence, corrections.compose(bound)(evidence)))[POWER]


def test_one_minus_p_has_the_mean_of_the_score_norm() -> None:
    probs = torch.tensor([0.6, 0.25, 0.1, 0.05], dtype=torch.float64)
    exact = sum(p * float(((torch.eye(4)[y] - probs) ** 2).sum()) for y, p in enumerate(probs.tolist()))
    assert exact == pytest.approx(float((probs * (1 - probs)).sum()))


def test_power_by_hand_with_weights_and_a_rejected_row() -> None:
    """Two tokens with advantage 2 at p = 1/2, three with -1 at p = 1/4, of which one is broken, and an empty row."""
    current = torch.tensor([[0.5, 0.5, 1.0], [0.25, 0.25, 0.25], [1.0, 1.0, 1.0]], dtype=torch.float64).log()
    mask = torch.tensor([[True, True, False], [True, True, True], [False, False, False]])
    rollout = current.clone()
    rollout[1, 0] -= math.log(1.5)
    rollout[1, 2] = -30.0
    advantages = torch.tensor([[2.0], [-1.0], [7.0]]).expand(3, 3)
    evidence = Evidence(LogRatios(rollout, current, current, mask), advantages)
    rows = [2 * 4 * 0.5, (1.5**2 + 1 + 2.0**2) * 0.75]
    assert power(evidence, ("token_tis", {"cap": 2.0})) == pytest.approx(sum(rows) / 2)
    dropped = power(evidence, ("token_tis", {"cap": 2.0}), ("icepop", {"weight": "one", "low": 0.9, "high": 1.4}))
    assert dropped == pytest.approx((2 * 4 * 0.5 + 0.75) / 2)


def test_power_adds_over_micro_batches() -> None:
    gen = torch.Generator().manual_seed(0)
    current = -torch.rand(6, 5, generator=gen, dtype=torch.float64)
    mask, advantages = torch.rand(6, 5, generator=gen) < 0.6, torch.randn(6, 5, generator=gen)

    def of(rows: slice) -> Evidence:
        return Evidence(LogRatios(current[rows], current[rows], current[rows], mask[rows]), advantages[rows])

    keep = corrections.compose([])
    parts = [gradient_power(of(rows), keep(of(rows))) for rows in (slice(0, 2), slice(2, 6), slice(6, 6))]
    assert diagnostics.finalize(diagnostics.add(parts))[POWER] == pytest.approx(power(of(slice(0, 6))))


def test_noise_is_what_the_signal_leaves_of_the_power() -> None:
    got = gradient_noise({POWER: 10.0}, grad_norm=2.0, num_rows=4)
    assert got == {"variance/signal_strength": 4.0, "variance/pure_noise": 2.0}
    assert gradient_noise({POWER: 1.0}, grad_norm=2.0, num_rows=4)["variance/pure_noise"] == 0.0
    unknown: list[tuple[dict[str, float], float, int]] = [
        ({}, 1.0, 4), ({POWER: 1.0}, math.nan, 4), ({POWER: math.inf}, 1.0, 4), ({POWER: 1.0}, 1.0, 1),
    ]  # fmt: skip
    for measured, norm, rows in unknown:
        assert gradient_noise(measured, norm, rows) == {}


def test_the_baseline_explains_what_prompts_differ_by() -> None:
    groups = np.repeat([0, 1, 2], 4)
    apart = explained_variance(np.repeat([0.0, 0.5, 1.0], 4) + np.tile([0, 0.01, 0, 0.01], 3), groups)
    assert apart["reward/explained_variance"] > 0.99
    alike = explained_variance(np.tile([0.0, 1.0, 0.0, 1.0], 3), groups)["reward/explained_variance"]
    assert alike == pytest.approx(1 - (4 / 3) ** 2)
    rewards = np.array([1.0, 0.0, 0.3, 9.0])
    left = rewards[:3] - np.array([0.15, 0.65, 0.5])
    lone = explained_variance(rewards, np.array([5, 5, 5, 6]))["reward/explained_variance"]
    assert lone == pytest.approx(1 - left.var() / rewards[:3].var())
    for unknown in (np.ones(4), np.zeros(0)):
        assert explained_variance(unknown, np.zeros(len(unknown), int)) == {}
    assert explained_variance(np.array([1.0, 0.0]), np.array([0, 1])) == {}
