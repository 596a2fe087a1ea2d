"""MiniRL: importance-weighted policy gradient, masked where PPO would clip."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_trm.losses.checks import require
from moe_trm.losses.inputs import LossInputs, TokenLoss
from moe_trm.losses.loss import loss
from moe_trm.methods import summable
from moe_trm.ratios import clamp_log_ratio


@loss(aggregation="token-mean", holds="total")
def minirl(inputs: LossInputs, log_ratio: Tensor, *, clip_low: float = 0.2, clip_high: float = 0.2) -> TokenLoss:
    """MiniRL: X = -W sg[w] m A log pi_theta; m = 0 iff (A > 0 and r > 1 + clip_high) or (A < 0 and r < 1 - clip_low).

    w is the total ratio to the rollout, r the ratio this loss reads (default: update). Rules that weigh are
    refused beside it: w already is a weight. Source: MiniRL (arXiv 2512.01374).

    When: MoE with replayed routes, few updates per step: the least machinery that corrects the engine mismatch.
    """
    require(clip_low >= 0 and clip_high >= 0, "minirl", "both >= 0", clip_low=clip_low, clip_high=clip_high)
    advantages, ratio = inputs.advantages, clamp_log_ratio(log_ratio.detach()).exp()
    masked = ((advantages > 0) & (ratio > 1 + clip_high)) | ((advantages < 0) & (ratio < 1 - clip_low))
    total = torch.where(inputs.keep, clamp_log_ratio(inputs.ratios.total.detach()), 0.0).exp()
    values = -inputs.weights * torch.where(masked, 0.0, total) * advantages * inputs.current_logprobs
    return TokenLoss(values, summable.fraction("pg_clipfrac", masked, inputs.keep))
