"""QUATRO: the exact KL-regularised update, stabilised by the log-ratio."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from moe_trm.losses.checks import require
from moe_trm.losses.inputs import LossInputs, TokenLoss
from moe_trm.losses.loss import loss
from moe_trm.ratios import clamp_log_ratio


@loss(aggregation="token-mean", experimental=True)
def quatro(inputs: LossInputs, log_ratio: Tensor, *, multiplier: float = 2.0) -> TokenLoss:
    """QUATRO: X = -W sg[r (A - multiplier log r)] log pi_theta.

    `multiplier` is the dual variable of max E[A] subject to KL <= budget (`optimal_multiplier` solves it for one
    prompt). The published sampled estimator, and whether it is per token or per sequence, are not established.
    Source: QUATRO.

    When: the trust region should be the same for every prompt whatever its reward spread. Research.
    """
    require(multiplier >= 0, "quatro", ">= 0", multiplier=multiplier)
    x = clamp_log_ratio(log_ratio.detach())
    return TokenLoss(-inputs.weights * x.exp() * (inputs.advantages - multiplier * x) * inputs.current_logprobs, {})


def optimal_multiplier(advantages: Sequence[float], budget: float) -> float:
    """lambda* of one prompt: KL(softmax(A / lambda) || uniform) = budget, by bisection; 0 for equal advantages.

    For a small budget about sqrt(Var(A) / (2 budget)). A budget that even the best sample alone does not use up gives
    0.
    """
    spread = max(advantages) - min(advantages)
    if spread == 0:
        return 0.0
    low, high = 1e-6 * spread, 1e6 * spread
    if _kl_to_uniform(advantages, low) <= budget:
        return 0.0
    for _ in range(200):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if _kl_to_uniform(advantages, middle) > budget else (low, middle)
    return low


def _kl_to_uniform(advantages: Sequence[float], multiplier: float) -> float:
    top = max(advantages)
    weights = [math.exp((a - top) / multiplier) for a in advantages]
    total = sum(weights)
    return sum(w / total * math.log(len(weights) * w / total) for w in weights if w > 0)
