"""Tapered off-policy REINFORCE: positive rows as they are, negative ones by their clipped trajectory ratio."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from moe_trm.corrections.rows import over_tokens, row_sum
from moe_trm.losses.checks import require
from moe_trm.losses.inputs import LossInputs, TokenLoss
from moe_trm.losses.loss import loss
from moe_trm.ratios import clamp_log_ratio


@loss(aggregation="seq-mean-token-sum", ratio="total", scope="sequence")
def topr(
    inputs: LossInputs,
    log_ratio: Tensor,
    *,
    low: float = 0.0,
    high: float = 1.0,
    level: Literal["trajectory", "token"] = "trajectory",
) -> TokenLoss:
    """TOPR: X = -W c A log pi_theta; c = 1 where A > 0, else clip(ratio, low, high), detached.

    The ratio is the trajectory's, exp(sum_t log w), or each token's with `level="token"`. The advantage stands for the
    reward minus a baseline. Source: TOPR (arXiv 2503.14286).

    When: rewards are sparse and many answers wrong or old: right ones are imitated, wrong ones tapered off.
    """
    require(0 <= low <= high, "topr", "0 <= low <= high", low=low, high=high)
    keep, x = inputs.keep, log_ratio.detach()
    summed = x if level == "token" else over_tokens(row_sum(x, inputs.counted), keep)
    taper = torch.where(inputs.advantages > 0, 1.0, clamp_log_ratio(summed).exp().clamp(low, high))
    return TokenLoss(-inputs.weights * taper * inputs.advantages * inputs.current_logprobs, {})
