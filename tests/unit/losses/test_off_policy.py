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


def test_length_surge_halves_the_learning_rate_down_to_a_floor() -> None:
    assert tools.surge_lr(1e-4, 121, 100, initial_lr=1e-4) == pytest.approx(5e-5)
    assert tools.surge_lr(1e-4, 119, 100, initial_lr=1e-4) == 1e-4
    assert tools.surge_lr(1.5e-5, 200, 100, initial_lr=1e-4) == pytest.approx(1e-5)
    assert math.isclose(tools.surge_lr(1e-4, 100, 0, initial_lr=1e-4), 1e-4)
