"""MinPRO: weight tokens by the smallest ratio before them."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_trm.losses.checks import require
from moe_trm.losses.inputs import LossInputs, TokenLoss
from moe_trm.losses.loss import loss
from moe_trm.methods import summable
from moe_trm.ratios import clamp_log_ratio


@loss(aggregation="token-mean", scope="sequence", experimental=True)
def minpro(inputs: LossInputs, log_ratio: Tensor, *, cap: float = 5.0) -> TokenLoss:
    """MinPRO: X = -W sg[min(rbar_t r_t, cap)] A log pi_theta, rbar_t = min_{s < t} r_s over earlier sampled tokens,
    rbar_1 = 1.

    The weight is published; the form of the loss and its clip are not established, so a capped, detached weight is
    used. Use `ratio="total"` without a proximal policy. Source: MinPRO.

    When: prefix ratios without their explosion on long answers. Research.
    """
    require(cap > 0, "minpro", "> 0", cap=cap)
    ratio = clamp_log_ratio(log_ratio.detach()).exp()
    weight = prefix_min(ratio, inputs.counted) * ratio
    values = -inputs.weights * weight.clamp(max=cap) * inputs.advantages * inputs.current_logprobs
    return TokenLoss(values, summable.fraction("pg_clipfrac", weight > cap, inputs.keep))


def prefix_min(values: Tensor, mask: Tensor) -> Tensor:
    """`[B, T]` minimum of `values` over the masked positions before each one; 1 where there is none."""
    if values.shape[1] == 0:
        return values
    running = torch.where(mask, values, torch.inf).cummin(dim=1).values
    earlier_min = torch.cat([torch.full_like(running[:, :1], torch.inf), running[:, :-1]], dim=1)
    return torch.where(earlier_min.isinf(), 1.0, earlier_min)
