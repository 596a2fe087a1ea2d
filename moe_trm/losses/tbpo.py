"""TBPO: two-sided bounds on the sequence ratio of negative rows."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_trm.corrections.rows import over_tokens, row_mean
from moe_trm.losses.checks import require
from moe_trm.losses.inputs import LossInputs, TokenLoss
from moe_trm.losses.loss import loss
from moe_trm.ratios import clamp_log_ratio


@loss(aggregation="seq-mean-token-mean", scope="sequence", experimental=True)
def tbpo(
    inputs: LossInputs, log_ratio: Tensor, *, clip_low: float = 3e-4, clip_high: float = 4e-4, dual_high: float = 4e-4
) -> TokenLoss:
    """TBPO: GSPO's loss on sigma_i, and for A < 0 also X <= -A (1 + dual_high): rows far above the band get no gradient
    either.

    The published bounds are not established; the defaults are GSPO's. Source: TBPO.

    When: wrong answers push probabilities down without end. Research.
    """
    require(
        min(clip_low, clip_high, dual_high) >= 0,
        "tbpo",
        "all >= 0",
        clip_low=clip_low,
        clip_high=clip_high,
        dual_high=dual_high,
    )
    keep = inputs.keep
    ratio = row_mean(clamp_log_ratio(log_ratio), inputs.counted).exp()
    advantage = row_mean(inputs.advantages, inputs.counted)
    values = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - clip_low, 1 + clip_high))
    bound = -advantage * (1 + dual_high)
    values = torch.where((advantage < 0) & (values > bound), bound, values)
    return TokenLoss(over_tokens(values, keep) * inputs.weights, {})
