"""Golden values and gradients of the objectives on the worked example."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_trm import losses
from tests.unit.conftest import WorkedExample
from tests.unit.losses.golden import CELLS, GOLDEN, Golden, evaluate


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda g: f"{g.name}-{g.case}" if g.case else g.name)
def test_value_and_gradient(golden: Golden, fx: WorkedExample) -> None:
    current = fx.current.clone().requires_grad_()
    loss = evaluate(golden, fx, current)
    (gradient,) = torch.autograd.grad(loss, current)
    assert loss.item() == pytest.approx(golden.value, abs=1.5e-6)
    got = [-gradient[cell].item() for cell in CELLS]
    assert got == pytest.approx(list(golden.coefficients), abs=1.5e-6)
    assert gradient.abs().sum().item() == pytest.approx(golden.total, abs=3e-6)
    assert not gradient[~fx.mask].any()


WITHOUT_CORRECTION = [g for g in GOLDEN if not g.correction]
REGRESSIONS = ("dpo", "oapl")
"""On policy their gradient is not the policy gradient."""
ON_POLICY = [g for g in WITHOUT_CORRECTION if g.name not in REGRESSIONS]
ON_POLICY += [Golden(name, 0, (), 0) for name in losses.names() if name not in {g.name for g in WITHOUT_CORRECTION}]


@pytest.mark.parametrize("golden", ON_POLICY, ids=lambda g: f"{g.name}-{g.case}" if g.case else g.name)
def test_on_policy_every_token_gets_its_advantage(golden: Golden, fx: WorkedExample) -> None:
    fx.rollout = fx.behavior = fx.current
    current = fx.current.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(evaluate(golden, fx, current), current)
    scale: dict[str, float | Tensor] = {
        "token-mean": 13.0,
        "seq-mean-token-mean": 4.0 * fx.mask.sum(1, keepdim=True),
        "seq-mean-token-sum": 4.0,
        "seq-mean-token-sum-norm": 20.0,
    }
    expected = fx.advantages / scale[golden.aggregation or losses.get(golden.name).aggregation]
    torch.testing.assert_close(-gradient, expected, rtol=0, atol=1e-9)
