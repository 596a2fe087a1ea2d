"""Rejection by length, on iid noise: a maximum rejects long rows more, means reject short rows more, sums collapse."""

from __future__ import annotations

import pytest
import torch

from moe_trm import corrections
from moe_trm.corrections.evidence import Evidence
from moe_trm.ratios import LogRatios

ROWS = 3000


def reject_rate(rule: str, length: int, **thresholds: float) -> float:
    gen = torch.Generator().manual_seed(length)
    noise = torch.randn(ROWS, length, generator=gen) * 0.1
    zero, mask = torch.zeros_like(noise), torch.ones(ROWS, length, dtype=torch.bool)
    correction = corrections.get(rule)(Evidence(LogRatios(zero, noise, noise, mask), zero - 1), **thresholds)
    return 1 - float(correction.keep.any(dim=1).float().mean())


def rates(rule: str, **thresholds: float) -> tuple[float, float]:
    return reject_rate(rule, 8, **thresholds), reject_rate(rule, 128, **thresholds)


def test_maximum_rejects_long_rows_as_its_token_rate_predicts() -> None:
    short, long = rates("trm_max", max_kl=0.045)  # |x| > 0.3: three standard deviations, p = 0.0027
    assert short == pytest.approx(1 - (1 - 0.0027) ** 8, abs=0.01)
    assert long == pytest.approx(1 - (1 - 0.0027) ** 128, abs=0.03)


@pytest.mark.parametrize(
    ("rule", "thresholds"),
    [
        ("trm_avg", {"mean_kl": 0.008}),
        ("ser", {"max_score": 0.1}),
        ("ln_trm", {"delta": 0.02, "max_score": 0.1}),
        ("opsm", {"delta": 0.03}),
        ("geometric_mask", {"low": 0.95, "high": 1.05}),
    ],
)
def test_means_reject_short_rows(rule: str, thresholds: dict[str, float]) -> None:
    short, long = rates(rule, **thresholds)
    assert short > 0.05
    assert long < short / 2


def test_sums_reject_long_rows() -> None:
    short, long = rates("seq_sum_k1", low=0.5, high=2.0)
    assert short < 0.05
    assert long > 0.4
