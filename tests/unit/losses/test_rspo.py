"""RSPO's scaled ratios, against a loop over floats."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moe_trm import losses
from moe_trm.errors import ConfigError
from moe_trm.losses import LossInputs
from moe_trm.methods.summable import finalize
from tests.unit.losses.test_acr_clip import ROWS, TOKENS
from tests.unit.losses.test_acr_clip import random_inputs as outlying

FLOOR = 0.8


def random_inputs(*rules: str, lag: float = 0.0) -> tuple[LossInputs, Tensor, Tensor]:
    """Those of `test_acr_clip` with routers that moved; and their log-update."""
    inputs, leaf, (_, update) = outlying(*rules, lag=lag)
    shift = 0.5 * torch.rand(ROWS, TOKENS, generator=torch.Generator().manual_seed(1))
    return replace(inputs, router_shift=shift), leaf, update


@pytest.mark.parametrize("lag", [0.0, 0.5])
@pytest.mark.parametrize("rules", [(), ("token_tis",), ("token_tis", "token_veto"), ("icepop",)])
def test_value_and_gradient_against_a_loop(rules: tuple[str, ...], lag: float) -> None:
    """Without stale samples and with them, alone and beside rules that weigh and drop."""
    inputs, leaf, update = random_inputs(*rules, lag=lag)
    assert inputs.router_shift is not None
    result = losses.get("rspo")(inputs)
    (gradient,) = torch.autograd.grad(torch.where(inputs.keep, result.values, 0.0).sum(), leaf)
    floored, moved = 0, 0.0
    for row in range(ROWS):
        for token in range(TOKENS):
            place = (row, token)
            if not inputs.keep[place]:
                assert gradient[place] == 0
                continue
            shift = float(inputs.router_shift[place])
            scale = max(math.exp(-shift), FLOOR)
            advantage, weight = float(inputs.advantages[place]), float(inputs.weights[place])
            ratio = scale * math.exp(float(update[place]))
            free, clipped = -advantage * ratio, -advantage * min(max(ratio, 0.8), 1.2)
            slope = free if free >= clipped or 0.8 <= ratio <= 1.2 else 0.0
            assert float(result.values[place].detach()) == pytest.approx(weight * max(free, clipped), abs=1e-6)
            assert float(gradient[place]) == pytest.approx(weight * slope, abs=1e-6)
            floored, moved = floored + (math.exp(-shift) < FLOOR), moved + shift
    kept, metrics = int(inputs.keep.sum()), finalize(result.metrics)
    assert 0 < floored < kept
    assert metrics["loss/router_floored"] == pytest.approx(floored / kept)
    assert metrics["loss/router_shift"] == pytest.approx(moved / kept, rel=1e-5)


def test_still_routers_leave_ppo() -> None:
    inputs, leaf, _ = random_inputs("token_tis")
    still = replace(inputs, router_shift=torch.zeros(ROWS, TOKENS))
    same, plain = losses.get("rspo")(still), losses.get("ppo_clip")(inputs)
    torch.testing.assert_close(same.values, plain.values)
    torch.testing.assert_close(
        *[torch.autograd.grad(one.values.sum(), leaf, retain_graph=True)[0] for one in (same, plain)]
    )


def test_it_says_what_it_lacks() -> None:
    inputs, _, _ = random_inputs()
    with pytest.raises(ConfigError, match="router_shift"):
        losses.get("rspo")(replace(inputs, router_shift=None))
    with pytest.raises(ConfigError, match="gamma_min"):
        losses.get("rspo").bind(gamma_min=1.5)
