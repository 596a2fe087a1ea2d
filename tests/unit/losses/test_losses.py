"""Golden values and gradients of the objectives on the worked example, against float64 finite differences as well."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from moe_trm import corrections, losses
from moe_trm.errors import ConfigError
from moe_trm.losses import LossInputs, aggregate
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


@pytest.mark.parametrize(
    "golden", [g for g in GOLDEN if not g.correction], ids=lambda g: f"{g.name}-{g.case}" if g.case else g.name
)
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
        inputs, keep=nothing, weights=inputs.weights * 0, rewards=fx.signs, group_ids=torch.tensor([0, 0, 1, 1])
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


def test_correction_weights_scale_the_gradient(fx) -> None:
    gradients = []
    for factor in (1.0, 0.25):
        current = fx.current.clone().requires_grad_()
        inputs = LossInputs.uncorrected(LogRatios(fx.rollout, fx.behavior, current, fx.mask), current, fx.advantages)
        inputs = replace(inputs, weights=inputs.weights * factor)
        losses.get("ppo_clip")(inputs).values.sum().backward()
        gradients.append(current.grad)
    torch.testing.assert_close(gradients[1], gradients[0] * 0.25)


def test_configuration_errors() -> None:
    with pytest.raises(ConfigError, match="did you mean 'clip_high'"):
        losses.get("ppo_clip").bind(clip_hi=0.3)
    with pytest.raises(ConfigError, match="clip range"):
        losses.get("ppo_clip").bind(dual_clip=0.5)
    with pytest.raises(ConfigError, match="did you mean 'ppo_clip'"):
        losses.get("ppo_clipp")
