"""Golden values and gradients of the objectives on the worked example, against float64 finite differences as well."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from moe_trm import corrections, losses
from moe_trm.errors import ConfigError
from moe_trm.losses import LossInputs, aggregate
from moe_trm.losses.covariance import clip_cov_candidates
from moe_trm.losses.espo import entropy_bins
from moe_trm.losses.m2po_clip import moment_cap
from moe_trm.losses.minpro import prefix_min
from moe_trm.losses.quatro import optimal_multiplier
from moe_trm.losses.r2vpo import next_penalty
from moe_trm.ratios import LogRatios
from moe_trm.summable import finalize

CELLS = ((0, 0), (0, 1), (1, 2), (2, 1), (3, 1))


@dataclass(frozen=True)
class Golden:
    """Loss value, -dL/d current_logprobs at CELLS, and the sum of its absolute values over all cells."""

    name: str
    value: float
    coefficients: tuple[float, ...]
    total: float
    parameters: dict[str, float | str] = field(default_factory=dict)
    aggregation: str | None = None
    correction: tuple[str, dict[str, float | str]] | None = None
    case: str = ""


P3 = (0.085013, 0.062979, -0.069603, 0, 0)
GOLDEN = [
    Golden("ppo_clip", 0.008834, P3, 0.674050),
    Golden("ppo_clip", 0.008834, P3, 0.674050, {"dual_clip": 3.0}, case="dual"),
    Golden("ppo_clip", -0.003473, P3, 0.674050, {"clip_high": 0.28}, case="higher"),
    Golden(
        "ppo_clip",
        -0.079932,
        (0.069073, 0.051171, -0.056552, 0, 0),
        0.627222,
        aggregation="seq-mean-token-mean",
        case="grpo",
    ),
    Golden(
        "ppo_clip",
        0.005742,
        (0.055259, 0.040937, -0.045242, 0, 0),
        0.438132,
        aggregation="seq-mean-token-sum-norm",
        case="drgrpo",
    ),
    Golden(
        "ppo_clip",
        -0.069081,
        (0.076923, 0.062979, -0.056986, 0, 0),
        0.670374,
        correction=("token_tis", {}),
        case="decoupled",
    ),
    Golden(
        "reinforce",
        0.556349,
        (0.226209, 0.226209, -0.226209, 0.5, -0.083218),
        3.059328,
        correction=("seq_tis", {"ratio": "total"}),
        case="seqtis",
    ),
    Golden("gspo", -0.000275, (0, 0, -0.0625, 0, 0), 0.25),
    Golden("gspo_token", -0.000275, (0, 0, -0.0625, 0, 0), 0.25),
    Golden("gmpo", -0.118072, (0.065704, 0.065704, -0.0625, 0.145229, 0), 0.926746),
    Golden("gpg", -0.092308, (0.076923, 0.076923, -0.076923, 0.076923, -0.076923), 1.0),
    Golden("cispo", 0.037034, (0.085013, 0.062979, -0.069603, 0.098462, -0.046656), 0.974615),
    Golden("sapo", -0.175435, (0.068883, 0.050753, -0.056411, 0.163673, -0.048447), 0.979859),
    Golden("dppo_tv", 0.119549, (0.085013, 0.062979, -0.069603, 0.103835, 0), 0.938707, {"ratio": "update"}),
    Golden(
        "dppo_kl",
        0.170836,
        (0.085013, 0.062979, -0.069603, 0.103835, 0),
        0.881721,
        {"ratio": "update", "bound_low": 0.04, "bound_high": 0.04},
    ),
    Golden("topr", 0.321753, (0.25, 0.25, -0.226209, 0.25, -0.083218), 2.654491),
    Golden("aspo", 0.049680, (0.069603, 0.093954, -0.069603, 0, 0), 0.689614),
    Golden("minpro", 0.061668, (0.085013, 0.069603, -0.076923, 0.103835, -0.038199), 0.920947),
    Golden("ctpo", 0.076965, (0, 0.069603, -0.076923, 0, 0), 0.369975),
    Golden("vespo", 0.076046, (0.083788, 0.083788, -0.068933, 0, -0.010773), 0.643204),
    Golden("unclipped", -0.033463, P3, 0.777885, correction=("m2po", {"ratio": "staleness"}), case="m2po"),
    Golden("m2po_clip", -0.026466, (0.085013, 0.062979, -0.069603, 0.103835, 0), 0.938707),
    Golden("dispo", 0.054230, (0.085013, 0.062979, -0.069603, 0.103835, -0.046656), 0.985363),
    Golden("r2vpo", -0.011201, (0.076072, 0.074395, -0.062979, 0.067508, -0.028298), 0.875274),
    Golden("kl_cov", -0.033656, (0.085013, 0.062979, -0.069603, 0.103835, -0.046656), 0.985363, {"share": 0.2}),
    Golden("quatro", -0.006745, (0.068011, 0.088171, -0.055682, 0.041534, 0), 0.769074),
    Golden(
        "oapl",
        0.457750,
        (0.083277, 0.083277, -0.166723, -0.279223, -0.041723),
        1.683613,
        {"beta": 0.5, "beta_value": 0.5},
    ),
    Golden("turn_ppo", -0.009380, (0.080867, 0.080867, -0.074401, 0.089372, 0), 0.810429),
]


def evaluate(golden: Golden, fx, current: Tensor) -> Tensor:
    ratios = LogRatios(fx.rollout, fx.behavior, current, fx.mask)
    inputs = LossInputs.uncorrected(ratios, current, fx.advantages)
    if golden.correction:
        rule, thresholds = golden.correction
        evidence = replace(fx.evidence, ratios=ratios)
        inputs = LossInputs.corrected(ratios, current, fx.advantages, corrections.get(rule)(evidence, **thresholds))
    inputs = replace(
        inputs,
        rewards=(fx.signs > 0).double(),
        group_ids=torch.tensor([0, 0, 1, 1]),
        entropy=torch.ones(4, 5),
        turn_ids=torch.tensor([[0] * 5, [0, 0, 1, 1, 1], [0] * 5, [0] * 5]),
    )
    objective = losses.get(golden.name)
    values = objective(inputs, **golden.parameters).values
    mode = golden.aggregation or objective.aggregation
    return aggregate(values, inputs.keep, fx.mask, mode, num_sequences=4, num_tokens=13, horizon=5)


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda g: f"{g.name}-{g.case}" if g.case else g.name)
def test_value_and_gradient(golden: Golden, fx) -> None:
    current = fx.current.clone().requires_grad_()
    loss = evaluate(golden, fx, current)
    loss.backward()
    assert loss.item() == pytest.approx(golden.value, abs=1.5e-6)
    got = [-current.grad[cell].item() for cell in CELLS]
    assert got == pytest.approx(list(golden.coefficients), abs=1.5e-6)
    assert current.grad.abs().sum().item() == pytest.approx(golden.total, abs=3e-6)
    assert not current.grad[~fx.mask].any()


WITHOUT_CORRECTION = [g for g in GOLDEN if not g.correction]
ON_POLICY = [g for g in WITHOUT_CORRECTION if g.name != "oapl"]  # a regression, not a policy gradient
ON_POLICY += [Golden(name, 0, (), 0) for name in losses.names() if name not in {g.name for g in WITHOUT_CORRECTION}]


@pytest.mark.parametrize("golden", ON_POLICY, ids=lambda g: f"{g.name}-{g.case}" if g.case else g.name)
def test_on_policy_every_token_gets_its_advantage(golden: Golden, fx) -> None:
    fx.rollout = fx.behavior = fx.current
    current = fx.current.clone().requires_grad_()
    evaluate(golden, fx, current).backward()
    scale = {
        "token-mean": 13.0,
        "seq-mean-token-mean": 4.0 * fx.mask.sum(1, keepdim=True),
        "seq-mean-token-sum": 4.0,
        "seq-mean-token-sum-norm": 20.0,
    }
    expected = fx.advantages / scale[golden.aggregation or losses.get(golden.name).aggregation]
    torch.testing.assert_close(-current.grad, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda g: f"{g.name}-{g.case}" if g.case else g.name)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e9])
def test_masked_cells_do_not_matter(golden: Golden, fx, poison: float) -> None:
    results = []
    for dirty in (False, True):
        if dirty:
            fx.rollout, fx.behavior, fx.current = (
                torch.where(fx.mask, v, poison) for v in (fx.rollout, fx.behavior, fx.current)
            )
        current = fx.current.clone().requires_grad_()
        loss = evaluate(golden, fx, current)
        loss.backward()
        results.append((loss.detach(), current.grad))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("name", losses.names())
def test_nothing_kept_gives_zero_loss_and_gradient(name: str, fx) -> None:
    current = fx.current.clone().requires_grad_()
    with torch.no_grad():
        current[2, 1] = torch.nan
    ratios = LogRatios(fx.rollout, fx.behavior, current, fx.mask)
    inputs = LossInputs.uncorrected(ratios, current, fx.advantages)
    nothing = torch.zeros_like(inputs.keep)
    inputs = replace(
        inputs,
        keep=nothing,
        weights=inputs.weights * 0,
        rewards=fx.signs,
        group_ids=torch.tensor([0, 0, 1, 1]),
        entropy=torch.ones(4, 5),
    )
    loss = aggregate(
        losses.get(name)(inputs).values,
        nothing,
        fx.mask,
        losses.get(name).aggregation,
        num_sequences=4,
        num_tokens=13,
        horizon=5,
    )
    loss.backward()
    assert loss.item() == 0
    assert not current.grad.any()


@pytest.mark.parametrize("name", losses.names())
def test_says_what_it_is(name: str) -> None:
    objective = losses.get(name)
    assert objective.name == name
    assert "Source:" in (objective.__doc__ or "")
    if objective.experimental:
        assert "not established" in (objective.__doc__ or "")


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


def test_ppo_metrics_count_clipped_tokens(fx) -> None:
    inputs = LossInputs.uncorrected(fx.ratios, fx.current, fx.advantages)
    got = finalize(losses.get("ppo_clip")(inputs).metrics)
    ratio, A = fx.ratios.update.exp(), fx.advantages
    expected = (((A > 0) & (ratio > 1.2)) | ((A < 0) & (ratio < 0.8))).sum().item() / 13
    assert got["loss/pg_clipfrac"] == pytest.approx(expected)
    assert got["loss/ppo_kl"] == pytest.approx(-fx.ratios.update.sum().item() / 13)


PENALISED = (
    "r2vpo",
    "kl_cov",
    "ipo_tv",
    "vespo",
)  # a penalty that weights do not touch, or weights inside the objective


@pytest.mark.parametrize("name", [name for name in losses.names() if name not in PENALISED])
def test_correction_weights_scale_the_gradient(name: str, fx) -> None:
    """One weight for all tokens, so that row-level means of weights are that weight too."""
    gradients = []
    for factor in (1.0, 0.25):
        current = fx.current.clone().requires_grad_()
        inputs = LossInputs.uncorrected(LogRatios(fx.rollout, fx.behavior, current, fx.mask), current, fx.advantages)
        inputs = replace(
            inputs,
            weights=inputs.weights * factor,
            rewards=fx.signs,
            group_ids=torch.tensor([0, 0, 1, 1]),
            entropy=torch.ones(4, 5),
        )
        losses.get(name)(inputs).values[fx.mask].sum().backward()
        gradients.append(current.grad)
    assert gradients[0].any()
    torch.testing.assert_close(gradients[1], gradients[0] * 0.25)


def test_vespo_takes_weights_into_its_sequence_ratio(fx) -> None:
    """A weight of e^c on every token acts like a log-ratio that is larger by c."""
    current = fx.current.clone().requires_grad_()
    plain = LossInputs.uncorrected(LogRatios(fx.rollout - 0.2, fx.behavior, current, fx.mask), current, fx.advantages)
    weighted = LossInputs.uncorrected(LogRatios(fx.rollout, fx.behavior, current, fx.mask), current, fx.advantages)
    weighted = replace(weighted, weights=weighted.weights * torch.tensor(0.2).double().exp())
    values = [losses.get("vespo")(inputs).values[fx.mask] for inputs in (plain, weighted)]
    torch.testing.assert_close(values[0], values[1])


def cells(name: str, fx, **parameters: float | str) -> Tensor:
    """-d sum(X) / d current_logprobs, before aggregation."""
    current = fx.current.clone().requires_grad_()
    inputs = LossInputs.uncorrected(LogRatios(fx.rollout, fx.behavior, current, fx.mask), current, fx.advantages)
    losses.get(name)(inputs, **parameters).values[fx.mask].sum().backward()
    return -current.grad


def test_minirl_weights_by_the_total_ratio_and_masks_by_the_update(fx) -> None:
    A, r, w = fx.advantages, fx.ratios.update.exp(), fx.ratios.total.exp()
    masked = ((A > 0) & (r > 1.2)) | ((A < 0) & (r < 0.8))
    torch.testing.assert_close(cells("minirl", fx), torch.where(masked, 0, w * A) * fx.mask)


def test_ipo_tv_masks_by_probability_and_pulls_back(fx) -> None:
    p, q, w, f = fx.current.exp(), fx.rollout.exp(), fx.ratios.total.exp(), fx.ratios.total
    expected = torch.where((p - q).abs() <= 0.1, fx.advantages * w, 0) - 2e-3 * f
    torch.testing.assert_close(cells("ipo_tv", fx), expected * fx.mask)


def test_dro_penalises_the_log_ratio(fx) -> None:
    torch.testing.assert_close(cells("dro", fx, beta=0.5), (fx.advantages - 0.5 * fx.ratios.update) * fx.mask)


def test_cispo_absolute_cap(fx) -> None:
    fx.behavior = fx.current - 2.0
    got = cells("cispo", fx, clip_high=5.0, cap_is_absolute=True)
    torch.testing.assert_close(got, 5.0 * fx.advantages)


def test_tbpo_gives_negative_rows_outside_the_band_no_gradient() -> None:
    for log_update, moves in ((-0.5, False), (0.0, True), (0.5, False)):
        inputs, current = one_token(log_update, -1.0)
        losses.get("tbpo")(inputs).values.sum().backward()
        assert bool(current.grad.any()) == moves


def test_ctpo_geometric_form_divides_the_prefix_by_its_length(fx) -> None:
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


def test_covariance_filters_choose_the_published_tokens(fx) -> None:
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


def test_m2po_cap_and_quatro_multiplier() -> None:
    squares = torch.tensor([0.01, 0.5, 0.02, 0.3, 0.001], dtype=torch.float64)
    cap = moment_cap(squares, 0.04)
    assert float(squares.clamp(max=cap**2).mean()) == pytest.approx(0.04)
    assert moment_cap(squares, 1.0) == float("inf")
    assert moment_cap(squares[:0], 0.1) == float("inf")
    assert optimal_multiplier([0.5, -0.5, 0.5, -0.5], 0.01) == pytest.approx(3.51779, abs=1e-5)
    assert optimal_multiplier([0.2, 0.2], 0.01) == 0.0
    assert next_penalty(0.5, 0.3, target=0.1, rate=2.0) == pytest.approx(0.9)
    assert next_penalty(0.1, 0.0, target=0.1, rate=2.0) == 0.0


def test_sapo_gate_has_slope_one_on_policy_and_vespo_peaks_where_published() -> None:
    for tau in (0.5, 1.0, 3.0):
        inputs, current = one_token(0.0, 1.0)
        losses.get("sapo")(inputs, tau_positive=tau).values.sum().backward()
        assert current.grad.item() == pytest.approx(-1.0)
    for advantage, peak, height in ((1.0, 2 / 3, 1.2081), (-1.0, 1.5, 1.2416)):
        inputs, current = one_token(float(torch.tensor(peak, dtype=torch.float64).log()), advantage)
        losses.get("vespo")(inputs).values.sum().backward()
        assert -current.grad.item() / advantage == pytest.approx(height, abs=1e-4)


@pytest.mark.parametrize("name", losses.names())
def test_extreme_ratios_stay_finite(name: str, fx) -> None:
    for shift in (1000.0, -1000.0):
        current = (fx.current + shift).float().requires_grad_()
        inputs = LossInputs.uncorrected(
            LogRatios(fx.rollout.float(), fx.behavior.float(), current, fx.mask), current, fx.advantages.float()
        )
        inputs = replace(inputs, rewards=fx.signs, group_ids=torch.tensor([0, 0, 1, 1]), entropy=torch.ones(4, 5))
        values = losses.get(name)(inputs).values[fx.mask]
        values.sum().backward()
        assert values.isfinite().all()
        assert current.grad.isfinite().all()


def test_espo_lies_between_gspo_token_and_token_ppo(fx) -> None:
    def values(name: str, **parameters: float | str) -> Tensor:
        inputs = LossInputs.uncorrected(fx.ratios, fx.current, fx.advantages)
        return losses.get(name)(replace(inputs, entropy=torch.ones(4, 5)), **parameters).values[fx.mask]

    torch.testing.assert_close(values("espo", num_bins=1), values("gspo_token", clip_low=0.2, clip_high=0.2))
    torch.testing.assert_close(values("espo", num_bins=5), values("ppo_clip"))
    bins = entropy_bins(torch.tensor([[0.3, 9.0, 0.1, 0.2, 0.4]]), torch.tensor([[True, False, True, True, True]]), 2)
    assert bins[0, [0, 2, 3, 4]].tolist() == [1, 0, 0, 1]


def test_configuration_errors() -> None:
    with pytest.raises(ConfigError, match="did you mean 'clip_high'"):
        losses.get("ppo_clip").bind(clip_hi=0.3)
    with pytest.raises(ConfigError, match="clip range"):
        losses.get("ppo_clip").bind(dual_clip=0.5)
    with pytest.raises(ConfigError, match="did you mean 'ppo_clip'"):
        losses.get("ppo_clipp")
