"""PPO's clipped surrogate with clip-higher and dual clip."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_trm.errors import ConfigError
from moe_trm.losses.inputs import LossInputs, TokenLoss
from moe_trm.losses.loss import loss
from moe_trm.methods import summable
from moe_trm.ratios import clamp_log_ratio


@loss(aggregation="token-mean")
def ppo_clip(
    inputs: LossInputs,
    log_ratio: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> TokenLoss:
    """PPO clip: X = W max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), r = exp(log_update), or the total ratio
    with `ratio="total"` (bypass mode).

    The gradient vanishes where A > 0 and r > 1 + clip_high, or A < 0 and r < 1 - clip_low. With `dual_clip` c > 1 and A
    < 0, X = W min(-A c, X), which bounds the loss of tokens that became likelier. W are the correction weights: with a
    correction on the merged ratio this is decoupled PPO. `clip_high=0.28` is DAPO's clip-higher; the aggregation makes
    it GRPO or Dr.GRPO. Metrics: `pg_clipfrac`, `pg_clipfrac_lower` (dual clip), `ppo_kl` = mean of -log r, over kept
    tokens.
    Source: PPO (arXiv 1707.06347); dual clip (1912.09729); clip-higher of DAPO (2503.14476).

    When: the default; with rules on the merged ratio it is decoupled PPO.
    """
    if clip_low < 0 or clip_high < 0 or (dual_clip is not None and dual_clip <= 1):
        raise ConfigError(
            "clip range cannot work",
            where="loss ppo_clip",
            got=f"clip_low={clip_low}, clip_high={clip_high}, dual_clip={dual_clip}",
            expected="clip_low >= 0, clip_high >= 0, dual_clip > 1 or none",
        )
    advantages, keep = inputs.advantages, inputs.keep
    ratio = clamp_log_ratio(log_ratio).exp()
    free, clipped = -advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    values = torch.maximum(free, clipped)
    metrics = summable.fraction("pg_clipfrac", clipped > free, keep) | summable.mean("ppo_kl", -log_ratio, keep)
    if dual_clip is not None:
        bound = -advantages * dual_clip
        binds = (advantages < 0) & (values > bound)
        values = torch.where(binds, bound, values)
        metrics |= summable.fraction("pg_clipfrac_lower", binds, keep)
    return TokenLoss(values * inputs.weights, metrics)
