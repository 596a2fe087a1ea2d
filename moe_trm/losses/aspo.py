"""ASPO: positive tokens weighted by the inverse of their ratio."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_trm.losses.checks import require
from moe_trm.losses.inputs import LossInputs, TokenLoss
from moe_trm.losses.loss import loss
from moe_trm.ratios import clamp_log_ratio


@loss(aggregation="token-mean")
def aspo(
    inputs: LossInputs, log_ratio: Tensor, *, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float = 3.0
) -> TokenLoss:
    """ASPO: A < 0 as PPO with the lower clip; A > 0: X = -W A (r' / sg[r']) / sg[r'], r' = min(r, 1 + clip_high).

    The coefficient of a positive token is A / r, so those that became less likely are pushed harder; 0 above the clip.
    Where the weight exceeds `dual_clip` c, X = -W c A log pi_theta: a bounded weight that keeps a gradient.
    Source: ASPO (arXiv 2510.06062), as in Archer2.0.

    When: tokens that are already likely take the whole positive gradient and entropy falls; its weights favour unlikely
    right tokens.
    """
    require(
        clip_low >= 0 and clip_high >= 0 and dual_clip > 1,
        "aspo",
        "clips >= 0, dual_clip > 1",
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
    )
    advantages, ratio = inputs.advantages, clamp_log_ratio(log_ratio).exp()
    bounded = -advantages * dual_clip * inputs.current_logprobs
    upper = ratio.clamp(max=1 + clip_high)
    flipped = -advantages * upper / upper.detach() ** 2
    positive = torch.where(1 / upper.detach() > dual_clip, bounded, flipped)
    lower = ratio.clamp(min=1 - clip_low)
    negative = torch.where(lower.detach() > dual_clip, bounded, -advantages * lower)
    return TokenLoss(torch.where(advantages < 0, negative, positive) * inputs.weights, {})
