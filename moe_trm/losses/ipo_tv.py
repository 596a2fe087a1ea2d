"""Ratio policy gradient inside a total-variation bound, with a squared log-ratio penalty."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_trm.losses.checks import require
from moe_trm.losses.inputs import LossInputs, TokenLoss
from moe_trm.losses.loss import loss
from moe_trm.methods import summable
from moe_trm.ratios import clamp_log_ratio


@loss(aggregation="token-mean", ratio="total")
def ipo_tv(inputs: LossInputs, log_ratio: Tensor, *, max_tv: float = 0.1, penalty: float = 1e-3) -> TokenLoss:
    """X = -W m A w + penalty (log w)^2, m = 1 iff |p - q| <= max_tv for the token's probabilities p now and q at
    rollout.

    Source: prime-rl's IPO-style loss.

    When: asynchronous rollouts whose anchor pass is to be saved: it reads only the rollout's log-probs.
    """
    require(max_tv > 0 and penalty >= 0, "ipo_tv", "max_tv > 0, penalty >= 0", max_tv=max_tv, penalty=penalty)
    x, current = clamp_log_ratio(log_ratio), inputs.current_logprobs.detach()
    inside = (current.exp() - (current - log_ratio.detach()).exp()).abs() <= max_tv
    policy = torch.where(inside, -inputs.advantages * x.exp(), 0.0)
    metrics = summable.fraction("pg_clipfrac", ~inside, inputs.keep)
    return TokenLoss(inputs.weights * policy + penalty * x**2, metrics)
