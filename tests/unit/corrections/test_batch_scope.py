"""Rules and numbers that need the whole minibatch: M2PO's mask, batch normalisation, calibrated thresholds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_trm import corrections
from moe_trm.corrections.batch_norm import normalized, weight_sums
from moe_trm.corrections.evidence import Evidence
from moe_trm.errors import ConfigError
from moe_trm.ratios import LogRatios
from tests.unit.conftest import WorkedExample


def from_total(log_ratio: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor | None = None) -> Evidence:
    zero = torch.zeros_like(log_ratio)
    mask = torch.ones_like(zero, dtype=torch.bool) if mask is None else mask
    return Evidence(LogRatios(zero, log_ratio, log_ratio, mask), advantages)


def test_m2po_drops_the_two_largest_moments() -> None:
    squares = torch.tensor([[0.01, 0.5, 0.02, 0.3, 0.001]], dtype=torch.float64)
    got = corrections.get("m2po")(from_total(squares.sqrt(), torch.ones_like(squares)), budget=0.04)
    assert got.keep.tolist() == [[True, False, True, False, True]]
    harmless = from_total(-squares.sqrt(), torch.ones_like(squares))
    assert torch.equal(corrections.get("m2po")(harmless, budget=0.04).keep, got.keep)
    assert corrections.get("m2po")(harmless, budget=0.04, over="harmful").keep.all()
    impossible = corrections.get("m2po")(from_total(squares.sqrt(), torch.ones_like(squares)), budget=1e-6)
    assert impossible.keep.tolist() == [[False, False, False, False, True]]


@settings(max_examples=40)
@given(seed=st.integers(0, 999), budget=st.floats(0.005, 0.5), over=st.sampled_from(["all", "harmful"]))
def test_m2po_agrees_with_a_loop(seed: int, budget: float, over: str) -> None:
    gen = torch.Generator().manual_seed(seed)
    x, mask = torch.randn(3, 6, generator=gen, dtype=torch.float64) * 0.4, torch.rand(3, 6, generator=gen) < 0.7
    advantages = torch.randn(3, 1, generator=gen, dtype=torch.float64).expand(3, 6)
    got = corrections.get("m2po")(from_total(x, advantages, mask), budget=budget, over=over)
    cells = [(i, j) for i in range(3) for j in range(6) if mask[i, j]]
    counted = [cell for cell in cells if over == "all" or x[cell] * advantages[cell] > 0]
    ranked = sorted(counted, key=lambda cell: -float(x[cell] ** 2))
    while len(ranked) > 1 and sum(float(x[c] ** 2) for c in ranked) / len(ranked) >= budget:
        ranked.pop(0)
    expected = mask.clone()
    for cell in set(counted) - set(ranked):
        expected[cell] = False
    assert torch.equal(got.keep, expected)


def test_m2po_bounds_the_moment_and_the_divergence_of_what_it_keeps() -> None:
    """At a budget of .04 harmful tokens alone leave .0618 on what is kept; over all tokens it is below the budget."""
    harmful, harmless = [0.1, 0.15, 0.2, 0.25, 0.5], [-0.2, -0.3, -0.35, -0.4]
    x = torch.tensor([[*harmful, *harmless]], dtype=torch.float64)
    evidence = from_total(x, torch.ones_like(x))
    moment = {over: x[corrections.get("m2po")(evidence, over=over).keep] ** 2 for over in ("all", "harmful")}
    assert float(moment["harmful"].mean()) > 0.04 > float(moment["all"].mean())
    weights = moment["all"].sqrt().exp()
    chi2 = (x[corrections.get("m2po")(evidence).keep].exp() - 1).square().mean()
    assert float(chi2) <= float(weights.max() ** 2 * moment["all"].mean())


@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
@pytest.mark.parametrize("over", ["all", "harmful"])
def test_m2po_drops_nan_whatever_it_counts(over: str, advantage: float) -> None:
    """Beside a token that is kept, and alone."""
    x = torch.tensor([[torch.nan, 0.1]], dtype=torch.float64)
    for alone in (False, True):
        evidence = from_total(x, torch.full_like(x, advantage), x.isnan() | (not alone))
        got = corrections.get("m2po")(evidence, over=over)
        assert got.keep.tolist() == [[False, not alone]]


def test_batch_scope_is_refused_on_micro_batches() -> None:
    rule = corrections.get("m2po").bind()
    with pytest.raises(ConfigError, match="whole minibatch"):
        corrections.compose([rule])
    corrections.compose([rule], whole_minibatch=True)


def test_golden_batch_normalisation(fx: WorkedExample) -> None:
    tis = corrections.get("token_tis")(fx.evidence)
    sums = weight_sums(tis, fx.mask, "token")
    assert corrections.finalize(sums)["weight"] == pytest.approx(1.044582, abs=1e-6)
    assert normalized(tis, sums).weights[fx.mask].mean().item() == pytest.approx(1.0)
    seq = corrections.get("seq_tis")(fx.evidence)
    sums = weight_sums(seq, fx.mask, "sequence")
    assert corrections.finalize(sums)["weight"] == pytest.approx(1.137623, abs=1e-6)
    scaled = normalized(seq, sums).weights.amax(dim=1)
    assert scaled.tolist() == pytest.approx([0.651198, 0.795375, 1.758051, 0.795375], abs=1e-6)


def test_normalisation_of_nothing_changes_nothing(fx: WorkedExample) -> None:
    tis = corrections.get("token_tis")(fx.evidence)
    empty = weight_sums(tis, torch.zeros_like(fx.mask), "token")
    assert torch.equal(normalized(tis, empty).weights, tis.weights)


CALIBRATED = tuple(name for name in corrections.names() if corrections.get(name).calibrate)


@pytest.mark.parametrize("name", CALIBRATED)
@pytest.mark.parametrize("rate", [0.02, 0.25])
def test_calibrated_threshold_rejects_the_target_share_of_its_window(name: str, rate: float) -> None:
    gen = torch.Generator().manual_seed(5)
    rule, fixed = corrections.get(name), {"delta": 0.02} if name == "ln_trm" else {}
    window, batches = [], []
    for _ in range(4):
        x = torch.randn(100, 8, generator=gen, dtype=torch.float64) * 0.3
        mask = torch.rand(100, 8, generator=gen) < 0.8
        mask[:, 0] = True
        batches.append(from_total(x, torch.randn(100, 1, generator=gen, dtype=torch.float64).expand(100, 8), mask))
        window.append(corrections.scores(rule, batches[-1], **fixed))
    bound = corrections.calibrate(rule, window, rate, **fixed)
    cap = bound.thresholds.get("cap")
    assert cap is None or isinstance(cap, float)
    units = rejected = 0
    for evidence, scores in zip(batches, window, strict=True):
        correction = bound(evidence)
        # What a cap truncates is kept, with the cap as its weight: all but the one score that the cap is.
        dropped = evidence.mask & (~correction.keep if cap is None else correction.weights >= cap)
        if name == "trm_soft":  # weighs down what is beyond its bound
            dropped = evidence.mask & (correction.weights < 1)
        rejected += int(dropped.sum() if rule.scope == "token" else dropped.any(dim=1).sum())
        units += len(scores)
    assert rejected / units == pytest.approx(rate, abs=2.5 / units)


def test_two_thresholds_are_put_at_one_quantile() -> None:
    """Rows that are first in one statistic and last in the other: each threshold rejects half of the target."""
    rule = corrections.get("trm_max_avg")
    place = torch.arange(1.0, 101.0)
    bound = corrections.calibrate(rule, [torch.stack([place, 10 * place.flip(0)], dim=1)], 0.1)
    max_kl, mean_kl = (float(bound.thresholds[name] or 0) for name in ("max_kl", "mean_kl"))
    assert max_kl * 10 == pytest.approx(mean_kl)
    rejected = (place > max_kl) | (10 * place.flip(0) > mean_kl)
    assert int(rejected.sum()) == 8  # at most the target: the next pair would make it 10, above the score that is kept
    again = corrections.calibrate(rule, [torch.stack([place, 10 * place.flip(0)], dim=1).flatten()], 0.1)
    assert again == bound


def test_calibration_errors() -> None:
    for rule, window, rate in (
        ("trm_max", [], 0.1),
        ("trm_max", [torch.ones(3)], 0.0),
        ("m2po", [torch.ones(3)], 0.1),
    ):
        with pytest.raises(ConfigError):
            corrections.calibrate(corrections.get(rule), window, rate)


def test_a_rejection_without_weights_masks_and_can_be_normalised(fx: WorkedExample) -> None:
    """A mask alone must act, and normalising its 0/1 weights is defined: both fail elsewhere."""
    joint = corrections.compose([corrections.get("geometric_mask").bind(low=0.95, high=1.05)])(fx.evidence)
    assert joint.keep.any(dim=1).tolist() == [False, True, False, True]
    assert joint.weights[fx.mask].tolist() == joint.keep[fx.mask].double().tolist()
    scaled = normalized(joint, weight_sums(joint, fx.mask, "token"))
    assert scaled.weights[fx.mask].mean().item() == pytest.approx(1.0)


def test_a_batch_that_is_rejected_whole_is_defined(fx: WorkedExample) -> None:
    joint = corrections.compose([corrections.get("ser").bind(max_score=1e-9)])(fx.evidence)
    assert not joint.keep.any()
    finished = corrections.finalize(joint.metrics)
    assert finished["correction/kept_fraction"] == finished["correction/kept_sequence_fraction"] == 0.0
    assert torch.equal(normalized(joint, weight_sums(joint, fx.mask, "token")).weights, joint.weights)
