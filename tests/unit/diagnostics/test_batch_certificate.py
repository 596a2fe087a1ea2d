"""The bounds on a batch: what is measured, and that the estimate is the theorem where a batch holds every context."""

from __future__ import annotations

import pytest
import torch

from moe_trm.corrections import Evidence
from moe_trm.diagnostics import certificate_estimate, divergences
from moe_trm.diagnostics.bounds import certificate
from moe_trm.methods.summable import add, finalize
from moe_trm.ratios import LogRatios


def evidence(log_w: torch.Tensor, mask: torch.Tensor, exact_kl: torch.Tensor | None = None) -> Evidence:
    zero = torch.zeros_like(log_w)
    return Evidence(LogRatios(zero, zero, log_w, mask), advantages=zero, exact_kl=exact_kl)


def test_figures_by_hand() -> None:
    """Rows of 20 and 2 tokens: positions 1 to 16 and from 17 on are summed apart; a tool token has no position."""
    mask = torch.ones(2, 21, dtype=torch.bool)
    mask[0, 3] = False
    mask[1, 2:] = False
    kl = torch.where(mask, 0.001, torch.nan).double()
    kl[0, 20] = 0.01
    log_w = torch.where(mask, 0.1, torch.nan).double()
    got = finalize(divergences(evidence(log_w, mask, kl)))
    tv = float(torch.tensor(0.1, dtype=torch.float64).expm1()) / 2
    assert got["trm/horizon"] == 20
    assert got["trm/max_kl"] == pytest.approx(0.01)
    assert got["trm/sequence_kl"] == pytest.approx((0.019 + 0.01 + 0.002) / 2)
    assert got["trm/tv_from_1"] == pytest.approx((16 + 2) / 2 * tv)
    assert got["trm/tv_from_17"] == pytest.approx(4 / 2 * tv)
    assert got["trm/tv_from_65"] == 0
    bounds = certificate_estimate(got)
    mean_tv = [9 * tv, *[0.0] * 15, 2 * tv, *[0.0] * 3]
    expected = certificate(20, 0.01, got["trm/sequence_kl"], mean_tv)
    assert bounds == pytest.approx({f"trm/bound_{name}": value for name, value in expected.items()})


def test_parts_add_up_and_nothing_gives_nothing() -> None:
    gen = torch.Generator().manual_seed(0)
    log_w = 0.1 * torch.randn(6, 30, generator=gen, dtype=torch.float64)
    mask = torch.rand(6, 30, generator=gen) < 0.7
    whole = finalize(divergences(evidence(log_w, mask)))
    parts = [divergences(evidence(log_w[rows], mask[rows])) for rows in (slice(0, 2), slice(2, 6), slice(0, 0))]
    assert finalize(add(parts)) == pytest.approx(whole)
    nothing = divergences(evidence(log_w[:0], mask[:0]))
    assert nothing.keys() == parts[0].keys()
    assert finalize(nothing) == {}
    assert certificate_estimate({}) == {}


def test_one_policy_is_certified_exactly() -> None:
    same = certificate_estimate(finalize(divergences(evidence(torch.zeros(3, 5), torch.ones(3, 5).bool()))))
    assert set(same.values()) == {0.0}


def test_the_estimate_covers_the_true_error_where_every_context_is_sampled() -> None:
    """Two tokens of two words.

    The batch is the whole tree, each answer once, drawn uniformly by mu; reward on one answer.
    """
    p = torch.tensor([0.6, 0.55], dtype=torch.float64)  # pi of word 1, at each position and whatever came before
    answers = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]])
    log_pi = torch.where(answers == 1, p, 1 - p).log()
    log_mu = torch.full_like(log_pi, 0.5).log()
    kl = (0.5 * (0.5 / p).log() + 0.5 * (0.5 / (1 - p)).log()).expand(4, 2)
    ratios = LogRatios(log_mu, log_mu, log_pi, torch.ones(4, 2).bool())
    bounds = certificate_estimate(finalize(divergences(Evidence(ratios, advantages=log_mu, exact_kl=kl))))
    reward, w = torch.tensor([0.0, 0.0, 0.0, 1.0]).double(), (log_pi - log_mu).exp()
    surrogate = (reward * (w - 1).sum(dim=1)).mean()
    error = (reward * w.prod(dim=1)).mean() - reward.mean() - surrogate
    assert 0 < error <= min(bounds.values())
