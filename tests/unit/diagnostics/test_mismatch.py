"""Golden metrics of the worked example, their limits, and strata of acceptance."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moe_trm import diagnostics
from moe_trm.corrections.evidence import Evidence
from moe_trm.ratios import LogRatios
from tests.unit.conftest import WorkedExample

GOLDEN = {
    "kl": -0.153846,
    "k3_kl": 0.674005,
    "chi2_token": 11.285581,
    "chi2_seq": 36.649858,
    "log_ppl_diff": -0.279167,
    "log_ppl_abs_diff": 0.345833,
    "ppl_ratio": 0.8559,
    "log_ppl_diff_max": 0.075,
    "log_ppl_diff_min": -1.25,
    "training_ppl": 2.30335,
    "rollout_ppl": 3.609127,
    "rollout_is_seq_eff_sample_size": 0.360328,
    "probs_pearson": 0.960585,
    "probs_diff_mean": 0.042686,
    "probs_diff_max": 0.204815,
}


@pytest.mark.parametrize(("name", "value"), GOLDEN.items())
def test_golden_engine_metrics(fx: WorkedExample, name: str, value: float) -> None:
    assert diagnostics.finalize(diagnostics.metrics(fx.evidence))[f"engine/{name}"] == pytest.approx(value, abs=1e-6)


def test_log_perplexities_are_means_of_rows(fx: WorkedExample) -> None:
    got = diagnostics.finalize(diagnostics.metrics(fx.evidence))
    for name, logprobs in (("rollout", fx.rollout), ("training", fx.behavior)):
        rows = [-float(row[mask].mean()) for row, mask in zip(logprobs, fx.mask, strict=True)]
        assert got[f"engine/{name}_log_ppl"] == pytest.approx(sum(rows) / len(rows))
    assert got["engine/training_log_ppl"] - got["engine/rollout_log_ppl"] == pytest.approx(got["engine/log_ppl_diff"])


@pytest.mark.parametrize("parts", [1, 3])
def test_percentiles_of_tokens_and_of_rows(parts: int) -> None:
    gen = torch.Generator().manual_seed(0)
    rollout = -torch.rand(300, 32, generator=gen, dtype=torch.float64) * 3
    log_ratio = 0.1 * torch.randn(300, 32, generator=gen, dtype=torch.float64)
    log_ratio[:2] += 3.0  # rows beyond the percentile
    mask = torch.rand(300, 32, generator=gen) < 0.8
    mask[5] = False
    measured = []
    for rows in torch.arange(300).chunk(parts):
        current = (rollout + log_ratio)[rows]
        ratios = LogRatios(rollout[rows], current, current, mask[rows])
        measured.append(diagnostics.metrics(Evidence(ratios, torch.ones(len(rows), 32))))
    got = diagnostics.finalize(diagnostics.add(measured))
    gaps = (rollout.exp() - (rollout + log_ratio).exp()).abs()[mask]
    excess = [float((2 * row[kept]).exp().mean() - 1) for row, kept in zip(log_ratio, mask, strict=True) if kept.any()]
    assert got["engine/probs_diff_p95"] == pytest.approx(float(gaps.quantile(0.95)), rel=0.1)
    assert got["total/chi2_token_p95"] == pytest.approx(float(torch.tensor(excess).quantile(0.95)), rel=0.1)
    assert got["total/chi2_token_p95"] < 0.3 < got["total/chi2_token"]


def test_total_metrics_compare_the_rollout_with_the_current_policy(fx: WorkedExample) -> None:
    got = diagnostics.finalize(diagnostics.metrics(fx.evidence))
    swapped = Evidence(LogRatios(fx.rollout, fx.current, fx.current, fx.mask), fx.advantages)
    expected = diagnostics.finalize(diagnostics.metrics(swapped))
    for name in GOLDEN:
        assert got[f"total/{name}"] == pytest.approx(expected[f"engine/{name}"])
    s = fx.ratios.staleness[fx.mask]
    assert got["staleness/k3_kl"] == pytest.approx(float((s.exp() - 1 - s).mean()))
    assert got["staleness/kl"] == pytest.approx(float(-s.mean()))
    assert got["engine/rollout_is_high_fraction"] == pytest.approx(1 / 13)
    assert got["engine/rollout_is_low_fraction"] == 0


def test_equal_policies_have_no_mismatch(fx: WorkedExample) -> None:
    fx.behavior = fx.current = fx.rollout
    got = diagnostics.finalize(diagnostics.metrics(fx.evidence))
    for name, value in got.items():
        one = name.endswith(
            (
                "probs_pearson",
                "log_odds",
                "log_odds_slope",
                "eff_sample_size",
                "_is_mean",
                "_is_seq_mean",
                "_max",
                "_min",
                "ppl_ratio",
            )
        )
        unlike = one and not name.endswith(("probs_diff_max", "log_ppl_diff_max", "log_ppl_diff_min"))
        expected = value if name.endswith("_ppl") else float(unlike)
        assert value == pytest.approx(expected, abs=1e-9), name
    assert got["engine/training_ppl"] == got["engine/rollout_ppl"]


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e9])
def test_masked_cells_and_empty_rows_do_not_matter(fx: WorkedExample, poison: float) -> None:
    expected = diagnostics.finalize(diagnostics.metrics(fx.evidence))
    fx.mask = torch.cat([fx.mask, torch.zeros(1, 5, dtype=torch.bool)])
    for name in ("rollout", "behavior", "current"):
        padded = torch.cat([getattr(fx, name), torch.zeros(1, 5)])
        setattr(fx, name, torch.where(fx.mask, padded, poison))
    fx.signs = torch.cat([fx.signs, torch.ones(1)])
    assert diagnostics.finalize(diagnostics.metrics(fx.evidence)) == pytest.approx(expected)


def test_micro_batches_add_up_and_an_empty_one_changes_nothing(fx: WorkedExample) -> None:
    evidence = fx.evidence
    parts = []
    for rows in (slice(0, 1), slice(1, 4), slice(4, 4)):
        ratios = LogRatios(fx.rollout[rows], fx.behavior[rows], fx.current[rows], fx.mask[rows])
        parts.append(diagnostics.metrics(Evidence(ratios, fx.advantages[rows])))
    assert parts[0].keys() == parts[2].keys()
    assert diagnostics.finalize(diagnostics.add(parts)) == pytest.approx(
        diagnostics.finalize(diagnostics.metrics(evidence))
    )


def test_merged_prefixes_when_behaviour_weights_are_gone(fx: WorkedExample) -> None:
    ratios = LogRatios(fx.rollout, None, fx.current, fx.mask, proximal_logprobs=fx.behavior)
    got = diagnostics.finalize(diagnostics.metrics(replace(fx.evidence, ratios=ratios)))
    assert got["merged/k3_kl"] == pytest.approx(0.674005, abs=1e-6)
    assert not any(name.startswith(("engine/", "staleness/")) for name in got)


def test_extreme_ratios_stay_finite(fx: WorkedExample) -> None:
    fx.behavior = fx.rollout + torch.tensor([[1000.0], [-1000.0], [700.0], [-300.0]])
    fx.current = fx.rollout - 1000.0
    got = diagnostics.finalize(diagnostics.metrics(fx.evidence))
    assert all(
        value == value and abs(value) != float("inf")
        for name, value in got.items()
        if "ppl" not in name and "prob" not in name
    )
