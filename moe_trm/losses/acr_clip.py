"""PPO's clip for quantised rollouts: its upper bound widens where the correction weight was truncated."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_trm.losses.checks import require
from moe_trm.losses.inputs import LossInputs, TokenLoss
from moe_trm.losses.loss import loss
from moe_trm.methods import summable
from moe_trm.ratios import clamp_log_ratio


@loss(aggregation="token-mean", experimental=True)
def acr_clip(
    inputs: LossInputs, log_ratio: Tensor, *, clip_low: float = 0.2, clip_high: float = 0.2, cap: float = 2.0
) -> TokenLoss:
    """Adaptive clipping range (ACR): X = W max(-A r, -A clip(r, 1 - clip_low, (1 + clip_high) / s)), r =
    exp(log_update), s = min(1, cap / rho), rho the merged ratio of learner to rollout at the step's start.

    W are the correction weights: with `token_tis` of the same `cap` W = min(rho, cap) = s rho, so truncation has scaled
    the token's objective by s. A good token whose rollout was rounded down then meets the clip after the same growth of
    its untruncated objective, not before. Where no ratio is above the cap it is `ppo_clip`, and without a rule nothing
    but the bound changes. s is constant in the gradient. Metrics: `pg_clipfrac`, `acr_widened`, the share of kept
    tokens with s < 1.

    The objective with (1 + clip_high) / s is the paper's; its definition of s is not established in what we could
    read: this is the factor by which truncation scales the ratio, as its text says of s. Its other half, the scaling of
    weights before they are rounded, is not here.
    Source: QuRL (arXiv 2602.13953).

    When: quantised rollouts (`rollout.fake_quantization`, `rollout.quantization`) with `token_tis`.
    """
    require(
        clip_low >= 0 and clip_high >= 0 and cap > 0,
        "acr_clip",
        "clip_low >= 0, clip_high >= 0, cap > 0",
        clip_low=clip_low,
        clip_high=clip_high,
        cap=cap,
    )
    advantages, keep = inputs.advantages, inputs.keep
    ratio = clamp_log_ratio(log_ratio).exp()
    merged = clamp_log_ratio(torch.where(keep, inputs.ratios.merged, 0.0)).exp()
    scale = (cap / merged).clamp(max=1.0)
    bounded = torch.minimum(ratio.clamp(min=1 - clip_low), (1 + clip_high) / scale)
    free, clipped = -advantages * ratio, -advantages * bounded
    metrics = summable.fraction("pg_clipfrac", clipped > free, keep) | summable.fraction("acr_widened", scale < 1, keep)
    return TokenLoss(torch.maximum(free, clipped) * inputs.weights, metrics)
