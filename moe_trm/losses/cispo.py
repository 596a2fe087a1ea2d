"""CISPO: clip the weight, never the gradient."""

from __future__ import annotations

from torch import Tensor

from moe_trm.losses.checks import require
from moe_trm.losses.inputs import LossInputs, TokenLoss
from moe_trm.losses.loss import loss
from moe_trm.methods import summable
from moe_trm.ratios import clamp_log_ratio


@loss(aggregation="token-mean")
def cispo(
    inputs: LossInputs,
    log_ratio: Tensor,
    *,
    clip_low: float = 1.0,
    clip_high: float = 0.28,
    cap_is_absolute: bool = False,
) -> TokenLoss:
    """CISPO: X = -W sg[clip(r, 1 - clip_low, 1 + clip_high)] A log pi_theta.

    Every token keeps a gradient; there is no trust region. `clip_low >= 1` is no lower bound, the published form. With
    `cap_is_absolute` the upper bound is `clip_high` itself (ScaleRL uses 5). Source: CISPO (MiniMax-M1, arXiv
    2506.13585).

    When: rare tokens ("wait", "however") are clipped away by `ppo_clip` although they carry the learning.
    """
    require(clip_low >= 0 and clip_high >= 0, "cispo", "both >= 0", clip_low=clip_low, clip_high=clip_high)
    ratio = clamp_log_ratio(log_ratio.detach()).exp()
    bounded = ratio.clamp(max(1 - clip_low, 0.0), clip_high if cap_is_absolute else 1 + clip_high)
    values = -inputs.weights * bounded * inputs.advantages * inputs.current_logprobs
    return TokenLoss(values, summable.fraction("pg_clipfrac", bounded != ratio, inputs.keep))
