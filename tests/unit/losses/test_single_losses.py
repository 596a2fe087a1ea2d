"""Properties of single objectives that others do not have."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moe_trm import losses
from moe_trm.errors import ConfigError
from moe_trm.losses import LossInputs
from moe_trm.losses.covariance import clip_cov_candidates
from moe_trm.losses.espo import entropy_bins
from moe_trm.losses.m2po_clip import moment_cap
from moe_trm.losses.minpro import prefix_min
from moe_trm.methods.summable import finalize
from moe_trm.ratios import LogRatios
from tests.unit.conftest import WorkedExample


def one_token(log_update: float, advantage: float) -> tuple[LossInputs, Tensor]:
    zero, one = torch.zeros(1, 1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64)
    current = (zero + log_update).requires_grad_()
    return LossInputs.uncorrected(LogRatios(zero, zero, current, one.bool()), current, one * advantage), current


@pytest.mark.parametrize(("dual_clip", "value", "gradient"), [(None, 5.0, 5.0), (3.0, 3.0, 0.0)])
def test_dual_clip_bounds_the_loss_of_tokens_that_became_likelier(
    dual_clip: float | None, value: float, gradient: float
) -> None:
    inputs, current = one_token(float(torch.tensor(5.0, dtype=torch.float64).log()), -1.0)
    loss = losses.get("ppo_clip")(inputs, dual_clip=dual_clip).values.sum()
    loss.backward()
    assert loss.item() == pytest.approx(value)
    assert current.grad.item() == pytest.approx(gradient)


@pytest.mark.parametrize(
    ("ratio", "advantage", "gradient"), [(0.5, 1, -2), (0.1, 1, -3), (1.5, 1, 0), (2, -1, 2), (5, -1, 3), (0.5, -1, 0)]
)
def test_aspo_turns_positive_ratios_round_and_bounds_both_weights(
    ratio: float, advantage: float, gradient: float
) -> None:
    inputs, current = one_token(math.log(ratio), advantage)
    losses.get("aspo")(inputs, dual_clip=3.0).values.sum().backward()
    assert current.grad.item() == pytest.approx(gradient)


@pytest.mark.parametrize("name", ["tau_positive", "tau_negative"])
def test_sapo_refuses_a_gate_without_slope(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}=0"):
        losses.get("sapo")(one_token(0.0, 1.0)[0], **{name: 0.0})


def test_ppo_metrics_count_clipped_tokens(fx: WorkedExample) -> None:
    inputs = LossInputs.uncorrected(fx.ratios, fx.current, fx.advantages)
    got = finalize(losses.get("ppo_clip")(inputs).metrics)
    ratio, A = fx.ratios.update.exp(), fx.advantages
    expected = (((A > 0) & (ratio > 1.2)) | ((A < 0) & (ratio < 0.8))).sum().item() / 13
    assert got["loss/pg_clipfrac"] == pytest.approx(expected)
    assert got["loss/ppo_kl"] == pytest.approx(-fx.ratios.update.sum().item() / 13)


def test_vespo_takes_weights_into_its_sequence_ratio(fx: WorkedExample) -> None:
    """A weight of e^c on every token acts like a log-ratio that is larger by c."""
    current = fx.current.clone().requires_grad_()
    plain = LossInputs.uncorrected(LogRatios(fx.rollout - 0.2, fx.behavior, current, fx.mask), current, fx.advantages)
    weighted = LossInputs.uncorrected(LogRatios(fx.rollout, fx.behavior, current, fx.mask), current, fx.advantages)
    weighted = replace(weighted, weights=weighted.weights * torch.tensor(0.2).double().exp())
    values = [losses.get("vespo")(inputs).values[fx.mask] for inputs in (plain, weighted)]
    torch.testing.assert_close(values[0], values[1])


def cells(name: str, fx: WorkedExample, **parameters: float | str) -> Tensor:
    """-d sum(X) / d current_logprobs, before aggregation."""
    current = fx.current.clone().requires_grad_()
    inputs = LossInputs.uncorrected(LogRatios(fx.rollout, fx.behavior, current, fx.mask), current, fx.advantages)
    total = losses.get(name)(inputs, **parameters).values[fx.mask].sum()
    (gradient,) = torch.autograd.grad(total, current)
    return -gradient


def test_minirl_weights_by_the_total_ratio_and_masks_by_the_update(fx: WorkedExample) -> None:
    A, r, w = fx.advantages, fx.ratios.update.exp(), fx.ratios.total.exp()
    masked = ((A > 0) & (r > 1.2)) | ((A < 0) & (r < 0.8))
    torch.testing.assert_close(cells("minirl", fx), torch.where(masked, 0, w * A) * fx.mask)


def test_ipo_tv_masks_by_probability_and_pulls_back(fx: WorkedExample) -> None:
    p, q, w, f = fx.current.exp(), fx.rollout.exp(), fx.ratios.total.exp(), fx.ratios.total
    expected = torch.where((p - q).abs() <= 0.1, fx.advantages * w, 0) - 2e-3 * f
    torch.testing.assert_close(cells("ipo_tv", fx), expected * fx.mask)


def test_dro_penalises_the_log_ratio(fx: WorkedExample) -> None:
    torch.testing.assert_close(cells("dro", fx, beta=0.5), (fx.advantages - 0.5 * fx.ratios.update) * fx.mask)


def test_cispo_absolute_cap(fx: WorkedExample) -> None:
    fx.behavior = fx.current - 2.0
    got = cells("cispo", fx, clip_high=5.0, cap_is_absolute=True)
    torch.testing.assert_close(got, 5.0 * fx.advantages)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize(("ratio", "value", "slope"), [(0.01, 0.01, 0.01), (2.9, 2.9, 2.9), (3.1, 3.0, 0.0)])
def test_capped_ratio_has_no_lower_clip(advantage: float, ratio: float, value: float, slope: float) -> None:
    inputs, current = one_token(float(torch.tensor(ratio, dtype=torch.float64).log()), advantage)
    loss = losses.get("capped_ratio")(inputs).values.sum()
    loss.backward()
    assert loss.item() == pytest.approx(-advantage * value)
    assert current.grad.item() == pytest.approx(-advantage * slope)


def test_tbpo_gives_negative_rows_outside_the_band_no_gradient() -> None:
    for log_update, moves in ((-0.5, False), (0.0, True), (0.5, False)):
        inputs, current = one_token(log_update, -1.0)
        losses.get("tbpo")(inputs).values.sum().backward()
        assert bool(current.grad.any()) == moves


def test_ctpo_geometric_form_divides_the_prefix_by_its_length(fx: WorkedExample) -> None:
    """With equal log-ratios the geometric prefix is constant, the cumulative one grows."""
    fx.behavior, fx.signs = fx.current - 0.01, torch.ones(4, dtype=torch.float64)
    wide = {"low": 9.0, "high": 9.0, "power": 0.0}
    rank = fx.mask.cumsum(1)
    torch.testing.assert_close(cells("ctpo", fx, form="geometric", **wide), fx.mask * torch.tensor(0.01).double().exp())
    torch.testing.assert_close(cells("ctpo", fx, **wide), fx.mask * (0.01 * rank.double()).exp())


def test_minpro_weights() -> None:
    ratios = torch.tensor([[0.9, 7.0, 1.2, 0.8, 1.1]], dtype=torch.float64)
    mask = torch.tensor([[True, False, True, True, True]])
    got = prefix_min(ratios, mask)
    assert got[mask].tolist() == [1, 0.9, 0.9, 0.8]
    assert (got * ratios)[mask].tolist() == pytest.approx([0.9, 1.08, 0.72, 0.88])


def test_covariance_filters_choose_the_published_tokens(fx: WorkedExample) -> None:
    behavior, fx.behavior = (
        fx.behavior,
        fx.current - 0.1,
    )  # the penalty has a slope everywhere; the choice depends on current log-probs alone
    with_penalty, without = cells("kl_cov", fx, share=0.2, beta=0.3), cells("kl_cov", fx, share=0.2, beta=0.0)
    assert (with_penalty != without).nonzero().tolist() == [[0, 2], [2, 0]]
    fx.behavior = behavior
    inputs = LossInputs.uncorrected(fx.ratios, fx.current, fx.advantages).kept()
    ratio, A = fx.ratios.update.exp(), fx.advantages
    clipped = ((A > 0) & (ratio > 1.2)) | ((A < 0) & (ratio < 0.8))
    assert clip_cov_candidates(inputs, clipped, 0.2, 1.0).sum() == 4
    dropped = [
        cells("clip_cov", fx, share=0.1, low=0.2, high=1.0, seed=seed) != cells("ppo_clip", fx) for seed in range(8)
    ]
    assert all(int(d.sum()) <= 1 for d in dropped)
    assert len({tuple(d.flatten().tolist()) for d in dropped}) > 1


def test_equal_advantages_have_no_covariance_in_float32_either() -> None:
    current = -torch.rand(4, 12, generator=torch.Generator().manual_seed(0))
    ratios = LogRatios(current, current, current, torch.ones(4, 12).bool())
    inputs = LossInputs.uncorrected(ratios, current, torch.full((4, 12), 0.8660251)).kept()
    assert not clip_cov_candidates(inputs, torch.zeros(4, 12).bool(), 0.0, 100.0).any()


def test_gmpo_clips_each_side_by_its_own_bound() -> None:
    """One token: exp(0.3) at A = 1 where the upper bound is 0.3, -exp(-0.1) at A = -1 where the lower one is 0.1."""
    for x, advantage, expected in (
        (0.6, 1.0, -math.exp(0.3)),
        (-0.6, -1.0, math.exp(-0.1)),
        (0.2, 1.0, -math.exp(0.2)),
    ):
        got = losses.get("gmpo")(one_token(x, advantage)[0], log_clip_low=0.1, log_clip_high=0.3)
        assert got.values.item() == pytest.approx(expected, abs=1e-6)


def test_kl_cov_adds_an_estimate_of_the_kl_whose_gradient_is_exact() -> None:
    """Over samples of four ids drawn from p, the mean of r - 1 - log r is KL(p || q), and so is its gradient."""
    p = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    logits = torch.tensor([0.3, -0.2, 0.5, 0.0], dtype=torch.float64, requires_grad=True)
    current = logits.log_softmax(0)[None]
    ratios = LogRatios(p.log()[None], p.log()[None], current, torch.ones(1, 4, dtype=torch.bool))
    inputs = LossInputs.uncorrected(ratios, current, torch.zeros(1, 4, dtype=torch.float64))
    estimate = losses.get("kl_cov")(inputs, share=1.0, beta=1.0, penalty="kl").values[0] @ p
    exact = p @ (p.log() - current[0])
    assert estimate.item() == pytest.approx(exact.item())
    by_estimate, by_exact = (torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (estimate, exact))
    torch.testing.assert_close(by_estimate, by_exact)


def test_dispo_by_the_sign_of_the_advantage_bounds_the_side_it_pushes_to() -> None:
    """Bounds 1 -+ 0.1 for right and 1 -+ 0.2 for wrong answers; r = 2 or 1/2."""
    own = {"correct_low": 0.1, "correct_high": 0.1, "incorrect_low": 0.2, "incorrect_high": 0.2}
    for x, advantage, reward, by_ratio, by_advantage in (
        (math.log(2), 1.0, 1.0, 1.1, 1.1),
        (math.log(2), -1.0, 1.0, 1.1, 2.0),
        (math.log(0.5), -1.0, 0.0, 0.8, 0.8),
        (math.log(0.5), 1.0, 0.0, 0.8, 0.5),
    ):
        inputs, current = one_token(x, advantage)
        inputs = replace(inputs, rewards=torch.tensor([reward]))
        for regimes, bounded in (("ratio", by_ratio), ("advantage", by_advantage)):
            values = losses.get("dispo")(inputs, regimes=regimes, **own).values.sum()
            [gradient] = torch.autograd.grad(values, current, retain_graph=True)
            assert -gradient.item() / advantage == pytest.approx(bounded, abs=1e-6)


def test_m2po_cap() -> None:
    squares = torch.tensor([0.01, 0.5, 0.02, 0.3, 0.001], dtype=torch.float64)
    cap = moment_cap(squares, 0.04)
    assert float(squares.clamp(max=cap**2).mean()) == pytest.approx(0.04)
    assert moment_cap(squares, 1.0) == float("inf")
    assert moment_cap(squares[:0], 0.1) == float("inf")


def test_sapo_gate_has_slope_one_on_policy_and_vespo_peaks_where_published() -> None:
    for tau in (0.5, 1.0, 3.0):
        inputs, current = one_token(0.0, 1.0)
        losses.get("sapo")(inputs, tau_positive=tau).values.sum().backward()
        assert current.grad.item() == pytest.approx(-1.0)
    for advantage, peak, height in ((1.0, 2 / 3, 1.2081), (-1.0, 1.5, 1.2416)):
        inputs, current = one_token(float(torch.tensor(peak, dtype=torch.float64).log()), advantage)
        losses.get("vespo")(inputs).values.sum().backward()
        assert -current.grad.item() / advantage == pytest.approx(height, abs=1e-4)


def test_espo_lies_between_gspo_token_and_token_ppo(fx: WorkedExample) -> None:
    def values(name: str, **parameters: float | str) -> Tensor:
        inputs = LossInputs.uncorrected(fx.ratios, fx.current, fx.advantages)
        return losses.get(name)(replace(inputs, entropy=torch.ones(4, 5)), **parameters).values[fx.mask]

    torch.testing.assert_close(values("espo", num_bins=1), values("gspo_token", clip_low=0.2, clip_high=0.2))
    torch.testing.assert_close(values("espo", num_bins=5), values("ppo_clip"))
    bins = entropy_bins(torch.tensor([[0.3, 9.0, 0.1, 0.2, 0.4]]), torch.tensor([[True, False, True, True, True]]), 2)
    assert bins[0, [0, 2, 3, 4]].tolist() == [1, 0, 0, 1]
