"""Statistics of a row are over all its sampled tokens: what a rule drops does not change what the others are worth."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_trm import corrections, losses
from moe_trm.corrections import Evidence
from moe_trm.losses import LossInputs
from moe_trm.ratios import LogRatios
from tests.unit.losses.every_field import with_every_field

BY_ROW = ("ctpo", "espo", "gmpo", "gspo", "gspo_token", "minpro", "oapl", "tbpo", "topr", "turn_ppo", "vespo")
WIDE: dict[str, dict[str, Any]] = {
    "gspo": {"clip_low": 0.9, "clip_high": 9.0},
    "gspo_token": {"clip_low": 0.9, "clip_high": 9.0},
    "tbpo": {"clip_low": 0.9, "clip_high": 9.0, "dual_high": 9.0},
    "turn_ppo": {"clip_low": 0.9, "clip_high": 9.0},
    "espo": {"num_bins": 1, "clip_low": 0.9, "clip_high": 9.0},
    "gmpo": {"log_clip_low": 5.0, "log_clip_high": 5.0},
    "ctpo": {"form": "geometric", "low": 5.0, "high": 5.0, "dual": 9.0, "power": 0.0},
    "topr": {"high": 9.0},
}


def outcome(loss: str, updates: list[float], far: int | None, *, advantage: float = -1.0) -> tuple[Tensor, Tensor]:
    """Values of each token, and their derivatives by each log-prob.

    IcePop drops token `far`, which the engine finds 100 times likelier.
    """
    update = torch.tensor([updates], dtype=torch.float64)
    mask = torch.ones(1, len(updates), dtype=torch.bool)
    current = torch.full_like(update, -1.0).requires_grad_()
    proximal = current.detach() - update
    rollout = proximal.clone()
    if far is not None:
        rollout[0, far] += math.log(100)
    ratios = LogRatios(rollout, proximal, current, mask)
    advantages = torch.full_like(update, advantage)
    correction = corrections.get("icepop")(Evidence(ratios, advantages), weight="one")
    assert int((~correction.keep).sum()) == (far is not None)
    inputs = LossInputs.corrected(ratios, current, advantages, correction)
    entropy, rows = torch.ones_like(update), torch.tensor([1.0], dtype=torch.float64)
    inputs = replace(inputs, rewards=rows, group_ids=torch.zeros(1, dtype=torch.int64), entropy=entropy)
    values = losses.get(loss)(inputs, ratio="update", **WIDE.get(loss, {})).values
    (slope,) = torch.autograd.grad(values[inputs.keep].sum(), current)
    return values.detach()[0], slope[0]


@pytest.mark.parametrize("loss", ["gspo", "gspo_token", "gmpo", "tbpo", "turn_ppo", "espo"])
def test_sigma_is_over_the_response(loss: str) -> None:
    """exp(1/4) over the four tokens, not exp(0) over the three that are kept."""
    values, slope = outcome(loss, [0.0, 0.0, 0.0, 1.0], far=3)
    torch.testing.assert_close(values[:3], torch.full_like(values[:3], math.exp(1 / 4)))
    assert float(values[0]) == pytest.approx(1.284, abs=1e-3)
    assert slope[3] == 0


def test_what_is_dropped_still_stands_before_the_others() -> None:
    cumulative, _ = outcome("ctpo", [1.0, 0.0, 0.0, 0.0], far=0)
    assert float(cumulative[3]) == pytest.approx(math.exp(1 / 4))
    smallest, _ = outcome("minpro", [-1.0, 0.0, 0.0, 0.0], far=0)
    assert float(smallest[3]) == pytest.approx(-math.exp(-1.0))
    tapered, _ = outcome("topr", [0.0, 0.0, 0.0, 1.0], far=3)
    assert float(tapered[0]) == pytest.approx(-math.exp(1.0))
    regressed, _ = outcome("oapl", [0.0, 0.0, 0.0, 1.0], far=3)
    assert float(regressed[0]) == pytest.approx(1.0)
    weighed, _ = outcome("vespo", [0.0, 0.0, 0.0, 1.0], far=3)
    assert float(weighed[0]) == pytest.approx(-math.exp(2 + 3 - 2 * math.e))


@pytest.mark.parametrize("advantage", [-1.0, 1.0])
@pytest.mark.parametrize("loss", BY_ROW)
def test_dropping_a_token_takes_its_own_gradient_and_nothing_else(loss: str, advantage: float) -> None:
    updates = [0.1, -0.2, 0.3, 0.05, -0.15]
    whole, whole_slope = outcome(loss, updates, None, advantage=advantage)
    for far in range(5):
        values, slope = outcome(loss, updates, far, advantage=advantage)
        kept = torch.arange(5) != far
        torch.testing.assert_close(values[kept], whole[kept])
        assert slope[far] == 0
        assert torch.equal(slope[kept].sign(), whole_slope[kept].sign())


@pytest.mark.parametrize("loss", [*BY_ROW, "dpo"])
def test_a_dropped_token_without_a_number_is_in_no_statistic(loss: str) -> None:
    mask = torch.ones(2, 3, dtype=torch.bool)
    current = torch.full((2, 3), -1.0)
    current[0, 1] = torch.nan
    current.requires_grad_()
    ratios = LogRatios(torch.full((2, 3), -1.1), torch.full((2, 3), -1.1), current, mask)
    keep = mask.clone()
    keep[0, 1] = False
    advantages = torch.tensor([[1.0], [-1.0]]).expand(2, 3)
    inputs = LossInputs(ratios, current, advantages, weights=keep.float(), keep=keep)
    values = losses.get(loss)(with_every_field(inputs, torch.full((2, 3), -1.2))).values
    assert values[keep].isfinite().all()
    (slope,) = torch.autograd.grad(values[keep].sum(), current)
    assert slope.isfinite().all()
