"""Oracles of the tools around the objectives."""

from __future__ import annotations

import math

import pytest
import torch

from moe_trm.errors import ConfigError
from moe_trm.losses import off_policy as tools

W = torch.tensor([1.0, 1, 1, 5], dtype=torch.float64)


def test_vcpo() -> None:
    ratio = float(tools.ess_ratio(W))
    assert ratio == pytest.approx(0.571429, abs=1e-6)
    assert float(tools.ess_ratio(W * 7)) == pytest.approx(ratio)
    assert tools.ess_lr_scale(ratio) == pytest.approx(0.755929, abs=1e-6)
    assert tools.ess_lr_scale(ratio, form="linear") == pytest.approx(ratio)
    assert tools.ess_lr_scale(1.0) == 1.0
    with pytest.raises(ConfigError):
        tools.ess_lr_scale(1.0, form="cubic")
    norms, rewards = torch.tensor([1.0, 2, 1, 1]).double(), torch.tensor([1.0, 0, 1, 0]).double()
    assert float(tools.off_policy_baseline(W, norms, rewards)) == pytest.approx(0.064516, abs=1e-6)


def test_gac_projection() -> None:
    g, previous = torch.tensor([1.0, 1, 0]).double(), torch.tensor([1.0, 0, 0]).double()
    got = tools.project_gradient(g, previous, max_cosine=0.1)
    assert got.tolist() == pytest.approx([0.141421, 1, 0], abs=1e-6)
    assert float(got @ previous / got.norm()) == pytest.approx(0.140028, abs=1e-6)
    assert tools.project_gradient(g, previous * 0, max_cosine=0.1) is g
    assert tools.project_gradient(-g, previous, max_cosine=0.1).equal(-g)


def test_length_surge_halves_the_learning_rate_down_to_a_floor() -> None:
    assert tools.surge_lr(1e-4, 121, 100, initial_lr=1e-4) == pytest.approx(5e-5)
    assert tools.surge_lr(1e-4, 119, 100, initial_lr=1e-4) == 1e-4
    assert tools.surge_lr(1.5e-5, 200, 100, initial_lr=1e-4) == pytest.approx(1e-5)
    assert math.isclose(tools.surge_lr(1e-4, 100, 0, initial_lr=1e-4), 1e-4)
