"""RSPO: PPO's clip on ratios that are scaled down where the router has moved."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_trm.errors import ConfigError
from moe_trm.losses.checks import require
from moe_trm.losses.inputs import LossInputs, TokenLoss
from moe_trm.losses.loss import loss
from moe_trm.methods import summable
from moe_trm.ratios import clamp_log_ratio


@loss(aggregation="seq-mean-token-mean", needs=("routers",))
def rspo(
    inputs: LossInputs,
    log_ratio: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    gamma_min: float = 0.8,
) -> TokenLoss:
    """Router-shift policy optimisation: X = W max(-A g r, -A clip(g r, 1 - clip_low, 1 + clip_high)), r =
    exp(log_update), g = max(exp(-Delta), gamma_min).

    Delta is the mean over layers and replayed experts of |log r_now(e) - log r_anchor(e)|, r(e) the router's score of
    expert e: its softmax probability, or its sigmoid. g has no gradient. Experts are those that replay gives
    (`replay.mode`), in both passes. Metrics: `pg_clipfrac`, `router_shift`, the mean of Delta, and `router_floored`,
    the share of kept tokens at gamma_min.
    Needs `routers`. Source: RSPO (arXiv 2510.23027), the form that scales the ratio before its clip; its first version
    scaled after it, in GMPO's mean.

    When: several updates for each batch, whose routers move while the experts stay.
    """
    require(
        clip_low >= 0 and clip_high >= 0 and 0 <= gamma_min <= 1,
        "rspo",
        "clips >= 0, gamma_min between 0 and 1",
        clip_low=clip_low,
        clip_high=clip_high,
        gamma_min=gamma_min,
    )
    if inputs.router_shift is None:
        raise ConfigError(
            "rspo scales ratios by how far the router has moved",
            where="loss rspo",
            got="no router shift",
            expected="router_shift of shape [B, T]",
        )
    advantages, keep = inputs.advantages, inputs.keep
    shift = torch.where(keep, inputs.router_shift.detach().to(log_ratio), 0.0)
    scale = (-shift).exp()
    ratio = clamp_log_ratio(log_ratio).exp() * scale.clamp(min=gamma_min)
    free, clipped = -advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    metrics = (
        summable.fraction("pg_clipfrac", clipped > free, keep)
        | summable.mean("router_shift", shift, keep)
        | summable.fraction("router_floored", scale < gamma_min, keep)
    )
    return TokenLoss(torch.maximum(free, clipped) * inputs.weights, metrics)
