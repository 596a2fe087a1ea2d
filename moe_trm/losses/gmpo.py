"""Geometric-mean policy optimisation."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_trm.corrections.rows import over_tokens, row_mean
from moe_trm.losses.checks import require
from moe_trm.losses.inputs import LossInputs, TokenLoss
from moe_trm.losses.loss import loss
from moe_trm.methods import summable
from moe_trm.ratios import clamp_log_ratio


@loss(aggregation="seq-mean-token-mean", scope="sequence")
def gmpo(inputs: LossInputs, log_ratio: Tensor, *, log_clip_low: float = 0.4, log_clip_high: float = 0.4) -> TokenLoss:
    """GMPO: X_i = -A_i exp(mean_t x'_t), x' = sgn(A) min(sgn(A) x, sgn(A) clip(x, -log_clip_low, log_clip_high)), x =
    log_update.

    The clip is per token and in log space, the mean over all sampled tokens; correction weights enter as their
    geometric mean over the row's kept tokens.
    Source: GMPO (arXiv 2507.20673).

    When: outlier tokens dominate the mean of `ppo_clip`; steadier, at a narrower step.
    """
    bounds = {"log_clip_low": log_clip_low, "log_clip_high": log_clip_high}
    require(min(bounds.values()) > 0, "gmpo", "all > 0", **bounds)
    keep, sign = inputs.keep, inputs.advantages.sign()
    x = clamp_log_ratio(log_ratio)
    clipped = x.clamp(-log_clip_low, log_clip_high)
    limited = sign * torch.minimum(sign * x, sign * clipped)
    log_weight = torch.where(keep, inputs.weights, 1.0).log()
    average = row_mean(limited, inputs.counted) + row_mean(log_weight, keep)
    value = -row_mean(inputs.advantages, inputs.counted) * average.exp()
    metrics = summable.fraction("pg_clipfrac", sign * x > sign * clipped, keep)
    return TokenLoss(over_tokens(value, keep), metrics)
