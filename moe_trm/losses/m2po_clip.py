"""M2PO in the clipping form of its released code."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moe_trm.losses.checks import require
from moe_trm.losses.inputs import LossInputs, TokenLoss
from moe_trm.losses.loss import loss
from moe_trm.methods import summable
from moe_trm.ratios import clamp_log_ratio


@loss(aggregation="token-mean", scope="batch")
def m2po_clip(
    inputs: LossInputs, log_ratio: Tensor, *, budget: float = 0.04, min_low: float = 0.3, min_high: float = 0.5
) -> TokenLoss:
    """M2PO, clipping form: PPO clip with the bounds e^{-t}, e^{t} at which capping |log r| at t brings its second
    moment to `budget`.

    The moment is taken over harmful tokens (A > 0 and r > 1, or A < 0 and r < 1) of the minibatch; the clip is never
    tighter than 1 - min_low, 1 + min_high. The masking form is the correction `m2po` with the loss `unclipped`.
    Source: M2PO (arXiv 2510.01161).

    When: as the rule `m2po`, when tokens should be clipped rather than dropped.
    """
    require(
        budget > 0 and min_low >= 0 and min_high >= 0,
        "m2po_clip",
        "budget > 0, floors >= 0",
        budget=budget,
        min_low=min_low,
        min_high=min_high,
    )
    advantages, x = inputs.advantages, clamp_log_ratio(log_ratio)
    harmful = inputs.keep & (x.detach() * advantages > 0)
    cap = moment_cap(x.detach()[harmful] ** 2, budget)
    low, high = max(1 - math.exp(-cap), min_low), max(math.exp(min(cap, 20.0)) - 1, min_high)
    ratio = x.exp()
    free, clipped = -advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high)
    metrics = summable.fraction("pg_clipfrac", clipped > free, inputs.keep)
    return TokenLoss(torch.maximum(free, clipped) * inputs.weights, metrics)


def moment_cap(squares: Tensor, budget: float) -> float:
    """The t with mean(min(x, t^2)) = budget for the given squares x; infinity if their mean is within the budget."""
    count = len(squares)
    if count == 0 or float(squares.double().mean()) <= budget:
        return math.inf
    ascending = squares.double().sort().values
    below = torch.cat([ascending.new_zeros(1), ascending.cumsum(0)[:-1]])
    capped = (count * budget - below) / torch.arange(count, 0, -1, device=squares.device)
    first = int((capped <= ascending + 1e-15).nonzero()[0])
    return math.sqrt(max(float(capped[first]), 0.0))
