"""KL estimators by exact enumeration of a four-way softmax: expectations, and gradients of expectations."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from moe_trm.errors import ConfigError
from moe_trm.losses.kl import AdaptiveKL, importance_corrected_k3, kl_estimate, rollout_kl
from moe_trm.ratios import LogRatios

THETA = torch.tensor([0.3, -0.2, 0.5, 0.0], dtype=torch.float64)
REFERENCE = torch.tensor([0.0, 0.1, -0.3, 0.2], dtype=torch.float64).log_softmax(0)
BEHAVIOR = torch.tensor([0.1, 0.4, -0.2, 0.0], dtype=torch.float64).log_softmax(0)
MASK = torch.ones(4, dtype=torch.bool)


def gradient_of_mean(name: str, sampler: Tensor | None = None) -> tuple[float, Tensor]:
    """Mean and gradient over all four tokens, weighted by fixed sampling probabilities as in a sampled loss."""
    theta = THETA.clone().requires_grad_()
    current = theta.log_softmax(0)
    if sampler is None:
        weights, values = current.detach().exp(), kl_estimate(name, current, REFERENCE, MASK)
    else:
        weights, values = sampler.exp(), importance_corrected_k3(current - sampler, current, REFERENCE, MASK)
    mean = (weights * values).sum()
    (gradient,) = torch.autograd.grad(mean, theta)
    return float(mean.detach()), gradient


def true_gradient(forward: bool) -> Tensor:
    theta = THETA.clone().requires_grad_()
    p, q = theta.log_softmax(0), REFERENCE
    kl = (p.exp() * (p - q)).sum() if forward else (q.exp() * (q - p)).sum()
    (gradient,) = torch.autograd.grad(kl, theta)
    return gradient


@pytest.mark.parametrize(
    ("name", "value"),
    [("k1", 0.096145), ("k2", 0.103343), ("k3", 0.096145), ("abs", 0.408923), ("k1+", 0.096145), ("k3+", 0.096145)],
)
def test_golden_expectations(name: str, value: float) -> None:
    assert gradient_of_mean(name)[0] == pytest.approx(value, abs=1e-6)


def test_gradients_of_expectations() -> None:
    forward, backward = true_gradient(forward=True), true_gradient(forward=False)
    assert gradient_of_mean("k1")[1].abs().max() < 1e-12
    for name in ("k2", "k1+", "k3+"):
        torch.testing.assert_close(gradient_of_mean(name)[1], forward)
    torch.testing.assert_close(gradient_of_mean("k3")[1], backward)
    assert not torch.allclose(forward, backward, atol=1e-3)


def test_importance_corrected_k3_has_the_exact_gradient_off_policy() -> None:
    value, gradient = gradient_of_mean("", BEHAVIOR)
    assert value == pytest.approx(0.096145, abs=1e-6)
    torch.testing.assert_close(gradient, true_gradient(forward=True))


def test_masked_cells_and_extremes() -> None:
    mask = torch.tensor([True, False, True])
    current = torch.tensor([-0.5, torch.nan, -2000.0], requires_grad=True)
    for name in ("k1", "abs", "k2", "k3", "k1+", "k3+"):
        got = kl_estimate(name, current, torch.tensor([-0.4, torch.inf, -1.0]), mask)
        assert got.isfinite().all()
        assert got[1] == 0
        (gradient,) = torch.autograd.grad(got.sum(), current)
        assert gradient.isfinite().all()
        assert gradient[1] == 0
    with pytest.raises(ConfigError, match="KL estimator"):
        kl_estimate("k4", current, current, mask)


def test_controllers() -> None:
    controller = AdaptiveKL(beta=0.2, target=0.1, horizon=10000)
    assert controller.next(0.3, 256).beta == pytest.approx(0.201024)
    assert controller.next(0.0, 256).beta == pytest.approx(0.2 * (1 - 0.2 * 0.0256))
    assert AdaptiveKL(beta=0.2, target=0.1, horizon=float("inf")).next(9.0, 256).beta == 0.2


def test_a_clipped_weight_is_the_smaller_of_both() -> None:
    """min(w k, clip(w) k) by hand, and its derivative: of w k below the clip, of 1.2 k beyond it."""
    for log_ratio in (-1.0, 0.1, 0.5):
        x, ratio = torch.tensor([0.4], dtype=torch.float64).requires_grad_(), math.exp(log_ratio)
        shift = x.detach() - log_ratio  # the policy that sampled
        got = importance_corrected_k3(x - shift, x, torch.zeros(1).double(), MASK[:1], clip=0.2)
        k, slope = math.exp(-0.4) - 1 + 0.4, 1 - math.exp(-0.4)
        assert got.tolist()[0] == pytest.approx(min(ratio * k, min(max(ratio, 0.8), 1.2) * k))
        (gradient,) = torch.autograd.grad(got.sum(), x)
        assert float(gradient) == pytest.approx(ratio * (k + slope) if ratio < 1.2 else 1.2 * slope)
    wide = importance_corrected_k3(x - shift, x, torch.zeros(1).double(), MASK[:1], clip=9.0)
    torch.testing.assert_close(wide, importance_corrected_k3(x - shift, x, torch.zeros(1).double(), MASK[:1]))


def test_the_soft_kl_has_the_gradient_of_the_kl_to_the_rollout() -> None:
    """Under on-policy sampling, by exact enumeration; stale or not, the ratio is the one to the rollout."""
    theta = THETA.clone().requires_grad_()
    current = theta.log_softmax(0)
    for proximal in (BEHAVIOR, current.detach()):
        ratios = LogRatios(REFERENCE[None], None, current[None], MASK[None], proximal[None])
        values, mask = rollout_kl(ratios)
        assert mask.all()
        (gradient,) = torch.autograd.grad((current.detach().exp() * values[0]).sum(), theta, retain_graph=True)
        torch.testing.assert_close(gradient, true_gradient(forward=True))


def test_the_soft_kl_leaves_bad_tokens_out_and_stays_finite() -> None:
    current = torch.tensor([[-1.0, torch.nan, -torch.inf, -500.0, -2.0]], dtype=torch.float64).requires_grad_()
    rollout = torch.full((1, 5), -1.5, dtype=torch.float64)
    mask = torch.tensor([[True, True, True, True, False]])
    values, counted = rollout_kl(LogRatios(rollout, None, current, mask, rollout))
    assert counted.tolist() == [[True, False, False, True, False]]
    assert values[counted].tolist() == pytest.approx([0.125, 200.0])
    (gradient,) = torch.autograd.grad(values[counted].sum(), current)
    assert gradient.tolist() == [[0.5, 0, 0, 0, 0]]
