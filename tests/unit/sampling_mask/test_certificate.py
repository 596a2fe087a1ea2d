"""Certified intervals enclose the exact divergence, and close when everything is recorded."""

from __future__ import annotations

import pytest
import torch

from moe_trm.sampling_mask.certificate import Bounds, kl_bounds, tv_bounds

MU, PI = torch.tensor([0.5, 0.3, 0.15, 0.05]).double(), torch.tensor([0.4, 0.4, 0.1, 0.1]).double()


def top(mu: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    values, ids = mu.log().topk(k)
    return values, torch.tensor([0, k]), ids


def test_golden_intervals() -> None:
    kl, tv = (f(*top(MU, 2), PI.log()[None]) for f in (kl_bounds, tv_bounds))
    assert [kl.low.item(), kl.high.item()] == pytest.approx([0.025267, 0.163897], abs=1e-6)
    assert [tv.low.item(), tv.high.item()] == pytest.approx([0.1, 0.3])
    whole = kl_bounds(*top(MU, 4), PI.log()[None])
    assert [whole.low.item(), whole.high.item()] == pytest.approx([0.051430, 0.051430], abs=1e-6)


def test_random_policies_are_enclosed() -> None:
    gen = torch.Generator().manual_seed(0)
    N, V = 60, 40
    z = torch.randn(N, V, generator=gen, dtype=torch.float64) * 3
    mu = z.log_softmax(1)
    pi = (z + torch.randn(N, V, generator=gen, dtype=torch.float64) * 0.3).log_softmax(1)
    exact_kl, exact_tv = (mu.exp() * (mu - pi)).sum(1), (mu.exp() - pi.exp()).abs().sum(1) / 2
    for k in (1, 2, 5, 20, 40):
        values, ids = mu.topk(k)
        offsets = torch.arange(N + 1) * k
        for exact, bounds in (
            (exact_kl, kl_bounds(values.flatten(), offsets, ids.flatten(), pi)),
            (exact_tv, tv_bounds(values.flatten(), offsets, ids.flatten(), pi)),
        ):
            assert (bounds.low <= exact + 1e-9).all()
            assert (exact <= bounds.high + 1e-9).all()


def test_decisions() -> None:
    bounds = Bounds(torch.tensor([0.1, 0.1, 0.5]), torch.tensor([0.2, 0.4, 0.6]))
    assert bounds.accept(0.3).tolist() == [True, False, False]
    assert bounds.accept(0.3, undecided=True).tolist() == [True, True, False]
    assert bounds.undecided(0.3).tolist() == [False, True, False]
    assert kl_bounds(
        torch.zeros(0), torch.zeros(1, dtype=torch.long), torch.zeros(0, dtype=torch.long), torch.zeros(0, 5)
    ).low.shape == (0,)
