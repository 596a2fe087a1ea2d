"""The clip that widens where a weight was truncated, against a loop over floats."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from moe_trm import corrections, losses
from moe_trm.errors import ConfigError
from moe_trm.losses import LossInputs
from moe_trm.methods.summable import finalize
from moe_trm.ratios import LogRatios
from tests.unit.conftest import WorkedExample

ROWS, TOKENS = 6, 9


def random_inputs(*rules: str, lag: float = 0.0, seed: int = 0) -> tuple[LossInputs, Tensor, tuple[Tensor, ...]]:
    """Rows with outliers of the engine, some of them old, under rules that weigh and drop."""
    draw = torch.Generator().manual_seed(seed)
    shape = ROWS, TOKENS
    rollout = -torch.rand(shape, generator=draw, dtype=torch.float64) - 0.1
    behavior = rollout + 1.2 * torch.randn(shape, generator=draw, dtype=torch.float64)
    proximal = behavior + lag * torch.randn(shape, generator=draw, dtype=torch.float64)
    current = proximal + 0.3 * torch.randn(shape, generator=draw, dtype=torch.float64)
    mask = torch.rand(shape, generator=draw) > 0.2
    advantages = torch.where(mask, torch.randn(ROWS, 1, generator=draw, dtype=torch.float64).expand(shape), 0.0)
    leaf = current.clone().requires_grad_()
    ratios = LogRatios(rollout, behavior, leaf, mask, proximal)
    evidence = corrections.Evidence(ratios, advantages)
    bound = [corrections.get(name).bind(ratio="merged") for name in rules]
    inputs = LossInputs.corrected(ratios, leaf, advantages, corrections.compose(bound)(evidence))
    return inputs, leaf, (proximal - rollout, current - proximal)


def by_hand(
    inputs: LossInputs, merged: float, update: float, place: tuple[int, int], cap: float
) -> tuple[float, float]:
    """Value and gradient of one token from the formula."""
    if not inputs.keep[place]:
        return 0.0, 0.0
    advantage, weight = float(inputs.advantages[place]), float(inputs.weights[place])
    ratio, scale = math.exp(update), min(1.0, cap / math.exp(merged))
    upper, lower = 1.2 / scale, 0.8
    free, clipped = -advantage * ratio, -advantage * min(max(ratio, lower), upper)
    inside = free >= clipped or lower <= ratio <= upper
    return weight * max(free, clipped), weight * -advantage * ratio if inside else 0.0


@pytest.mark.parametrize("lag", [0.0, 0.5])
@pytest.mark.parametrize("rules", [(), ("token_tis",), ("token_tis", "token_veto"), ("icepop",), ("geometric_mask",)])
def test_value_and_gradient_against_a_loop(rules: tuple[str, ...], lag: float) -> None:
    """Without stale samples and with them, alone and beside rules that weigh and drop."""
    inputs, leaf, (merged, update) = random_inputs(*rules, lag=lag)
    values = losses.get("acr_clip")(inputs).values
    (gradient,) = torch.autograd.grad(torch.where(inputs.keep, values, 0.0).sum(), leaf)
    widened = 0
    for row in range(ROWS):
        for token in range(TOKENS):
            place = (row, token)
            value, slope = by_hand(inputs, float(merged[place]), float(update[place]), place, cap=2.0)
            if inputs.keep[place]:
                assert float(values[place].detach()) == pytest.approx(value, abs=1e-12)
                widened += int(float(merged[place]) > math.log(2))
            assert float(gradient[place]) == pytest.approx(slope, abs=1e-12)
    assert widened or rules == ("geometric_mask",) or not bool(inputs.keep.any())


def test_it_is_ppo_where_nothing_was_truncated() -> None:
    inputs, leaf, _ = random_inputs("token_tis")
    wide, plain = losses.get("acr_clip")(inputs, cap=1e9), losses.get("ppo_clip")(inputs)
    torch.testing.assert_close(wide.values, plain.values)
    gradients = [torch.autograd.grad(loss.values.sum(), leaf, retain_graph=True)[0] for loss in (wide, plain)]
    torch.testing.assert_close(*gradients)
    assert finalize(wide.metrics)["loss/acr_widened"] == 0


def test_only_good_tokens_beyond_the_cap_train_further_than_with_ppo(fx: WorkedExample) -> None:
    """Cell (2, 1) was e^2.5 times less likely in the rollout: PPO drops it, this does not."""
    gradients = {}
    for name in ("ppo_clip", "acr_clip"):
        current = fx.current.clone().requires_grad_()
        ratios = LogRatios(fx.rollout, fx.behavior, current, fx.mask)
        inputs = LossInputs.uncorrected(ratios, current, fx.advantages)
        gradients[name] = torch.autograd.grad(losses.get(name)(inputs).values[fx.mask].sum(), current)[0]
    changed = gradients["ppo_clip"] != gradients["acr_clip"]
    assert changed.nonzero().tolist() == [[2, 1]]
    assert gradients["ppo_clip"][2, 1] == 0
    assert gradients["acr_clip"][2, 1] < 0


@pytest.mark.parametrize("parameters", [{"cap": 0.0}, {"clip_low": -0.1}, {"clip_high": -0.1}])
def test_parameters_that_cannot_work(parameters: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="acr_clip"):
        losses.get("acr_clip").bind(**parameters)
