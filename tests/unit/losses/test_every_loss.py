"""Properties of every objective: names, weights, empty and extreme batches, settings that cannot work."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moe_trm import losses
from moe_trm.errors import ConfigError
from moe_trm.losses import LossInputs, aggregate
from moe_trm.ratios import LogRatios
from tests.unit.conftest import WorkedExample
from tests.unit.losses.every_field import with_every_field


@pytest.mark.parametrize("name", losses.names())
def test_nothing_kept_gives_zero_loss_and_gradient(name: str, fx: WorkedExample) -> None:
    current = fx.current.clone().requires_grad_()
    with torch.no_grad():
        current[2, 1] = torch.nan
    ratios = LogRatios(fx.rollout, fx.behavior, current, fx.mask)
    inputs = with_every_field(LossInputs.uncorrected(ratios, current, fx.advantages), fx.behavior)
    nothing = torch.zeros_like(inputs.keep)
    inputs = replace(inputs, keep=nothing, weights=inputs.weights * 0)
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


PENALISED = (
    "r2vpo",
    "kl_cov",
    "ipo_tv",
    "vespo",
)  # a penalty that weights do not touch, or weights inside the objective


@pytest.mark.parametrize("name", [name for name in losses.names() if name not in PENALISED])
def test_correction_weights_scale_the_gradient(name: str, fx: WorkedExample) -> None:
    """One weight for all tokens, so that row-level means of weights are that weight too."""
    gradients: list[torch.Tensor] = []
    for factor in (1.0, 0.25):
        current = fx.current.clone().requires_grad_()
        inputs = LossInputs.uncorrected(LogRatios(fx.rollout, fx.behavior, current, fx.mask), current, fx.advantages)
        inputs = with_every_field(replace(inputs, weights=inputs.weights * factor), fx.behavior)
        gradients += torch.autograd.grad(losses.get(name)(inputs).values[fx.mask].sum(), current)
    assert gradients[0].any()
    torch.testing.assert_close(gradients[1], gradients[0] * 0.25)


@pytest.mark.parametrize("name", losses.names())
def test_extreme_ratios_stay_finite(name: str, fx: WorkedExample) -> None:
    for shift in (1000.0, -1000.0):
        current = (fx.current + shift).float().requires_grad_()
        ratios = LogRatios(fx.rollout.float(), fx.behavior.float(), current, fx.mask)
        inputs = LossInputs.uncorrected(ratios, current, fx.advantages.float())
        values = losses.get(name)(with_every_field(inputs, fx.behavior)).values[fx.mask]
        values.sum().backward()
        assert values.isfinite().all()
        assert current.grad.isfinite().all()


def test_configuration_errors() -> None:
    with pytest.raises(ConfigError, match="did you mean 'clip_high'"):
        losses.get("ppo_clip").bind(clip_hi=0.3)
    with pytest.raises(ConfigError, match="clip range"):
        losses.get("ppo_clip").bind(dual_clip=0.5)
    with pytest.raises(ConfigError, match="did you mean 'ppo_clip'"):
        losses.get("ppo_clipp")
    with pytest.raises(ConfigError, match="expected: a valid boolean"):
        losses.get("cispo").bind(cap_is_absolute="false")
    with pytest.raises(ConfigError, match="expected: a valid number"):
        losses.get("cispo").bind(clip_high=True)


ZEROS = {"clip_low": 0.0, "clip_high": 0.0}
EDGES: dict[str, tuple[list[dict[str, float]], list[dict[str, float]]]] = {
    "aspo": ([ZEROS], [{"dual_clip": 1.0}, {"clip_low": -0.1}, {"clip_high": -0.1}]),
    "capped_ratio": ([{"cap": 0.1}], [{"cap": 0.0}]),
    "cispo": ([ZEROS], [{"clip_low": -0.1}, {"clip_high": -0.1}]),
    "clip_cov": ([{"share": 1.0}], [{"share": 0.0}, {"share": 1.1}, {"low": 5.0, "high": 5.0}]),
    "ctpo": ([{"low": 0.0, "high": 0.0, "dual": 0.0}], [{"low": -0.1}, {"high": -0.1}, {"dual": -0.1}]),
    "dpo": ([{"beta": 0.1}], [{"beta": 0.0}]),
    "dppo_kl": ([{"bound_low": 0.1}], [{"bound_low": 0.0}, {"bound_high": 0.0}, {"cap": 0.0}]),
    "dppo_tv": ([{"bound_low": 0.1}], [{"bound_low": 0.0}, {"bound_high": 0.0}, {"cap": 0.0}]),
    "dro": ([{"beta": 0.1}], [{"beta": 0.0}]),
    "espo": ([{"num_bins": 1, **ZEROS}], [{"num_bins": 0}, {"clip_low": -0.1}, {"clip_high": -0.1}]),
    "gspo": ([ZEROS], [{"clip_low": -0.1}, {"clip_high": -0.1}]),
    "gspo_token": ([ZEROS], [{"clip_low": -0.1}, {"clip_high": -0.1}]),
    "ipo_tv": ([{"penalty": 0.0}], [{"max_tv": 0.0}, {"penalty": -0.1}]),
    "kl_cov": ([{"share": 1.0, "beta": 0.0}], [{"share": 0.0}, {"share": 1.1}, {"beta": -0.1}]),
    "m2po_clip": ([{"min_low": 0.0, "min_high": 0.0}], [{"budget": 0.0}, {"min_low": -0.1}, {"min_high": -0.1}]),
    "minirl": ([ZEROS], [{"clip_low": -0.1}, {"clip_high": -0.1}]),
    "minpro": ([{"cap": 0.1}], [{"cap": 0.0}]),
    "oapl": ([{"beta": 0.1}], [{"beta": 0.0}, {"beta_value": 0.0}]),
    "quatro": ([{"multiplier": 0.0}], [{"multiplier": -0.1}]),
    "quatro_query": ([{"budget": 0.1}], [{"budget": 0.0}]),
    "r2vpo": ([{"penalty": 0.0}], [{"penalty": -0.1}, {"target": 0.0, "rate": 0.1}, {"target": 0.1, "rate": 0.0}]),
    "r2vpo_clip": ([ZEROS], [{"variance": 0.0}, {"clip_low": -0.1}, {"clip_high": -0.1}]),
    "rspo": ([{"gamma_min": 0.0}, {"gamma_min": 1.0}], [{"gamma_min": -0.1}, {"gamma_min": 1.1}, {"clip_low": -0.1}]),
    "sapo": ([{"tau_positive": 0.1}], [{"tau_positive": 0.0}, {"tau_negative": 0.0}]),
    "tbpo": ([{"clip_low": 0.0, "clip_high": 0.0, "dual_high": 0.0}], [{"clip_low": -0.1}, {"dual_high": -0.1}]),
    "topr": ([{"low": 0.0, "high": 0.0}], [{"low": -0.1}, {"low": 1.0, "high": 0.5}]),
    "turn_ppo": ([ZEROS], [{"clip_low": -0.1}, {"clip_high": -0.1}]),
    "vespo": ([{"k_positive": 0.1}], [{"k_positive": 0.0}, {"k_negative": 0.0}]),
}
"""Parameters at the edge of what a loss takes, and beyond it."""


@pytest.mark.parametrize("name", EDGES)
def test_parameters_are_taken_up_to_their_edge(name: str) -> None:
    works, refused = EDGES[name]
    for parameters in works:
        losses.get(name).bind(**parameters)
    for parameters in refused:
        with pytest.raises(ConfigError, match="loss parameters cannot work"):
            losses.get(name).bind(**parameters)
