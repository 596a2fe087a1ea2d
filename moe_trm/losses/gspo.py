"""Group sequence policy optimisation: one ratio for each row."""

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
def gspo(inputs: LossInputs, log_ratio: Tensor, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> TokenLoss:
    """GSPO: X_i = W max(-A_i sigma_i, -A_i clip(sigma_i, 1 - clip_low, 1 + clip_high)), sigma_i = exp(mean_t
    log_update) over all sampled tokens of the row, kept or not.

    Every token carries its row's X_i, so `seq-mean-token-mean` is the mean over rows. A_i is the mean advantage of the
    row. The form of the paper; `gspo` of verl is `gspo_token` here. Both agree unless tokens of a row have unlike
    weights or advantages: here a token's weight multiplies the whole row's gradient.
    Source: GSPO (arXiv 2507.18071).

    When: MoE policies and long answers, where token ratios are noise and rewards are of whole answers.
    """
    require(clip_low >= 0 and clip_high >= 0, "gspo", "both >= 0", clip_low=clip_low, clip_high=clip_high)
    keep = inputs.keep
    ratio = row_mean(clamp_log_ratio(log_ratio), inputs.counted).exp()
    advantage = row_mean(inputs.advantages, inputs.counted)
    free, clipped = -advantage * ratio, -advantage * ratio.clamp(1 - clip_low, 1 + clip_high)
    metrics = summable.fraction("pg_clipfrac", over_tokens(clipped > free, keep), keep)
    return TokenLoss(over_tokens(torch.maximum(free, clipped), keep) * inputs.weights, metrics)


@loss(aggregation="seq-mean-token-mean", scope="sequence")
def gspo_token(inputs: LossInputs, log_ratio: Tensor, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> TokenLoss:
    """GSPO-token: PPO's clip on sigma_it = sg[sigma_i] pi_theta / sg[pi_theta], which lets advantages differ along a
    row.

    With one advantage and one weight a row, value and gradient equal `gspo`'s. The log-ratio is capped at 10. This
    is `gspo` of verl, which always aggregates it by `seq-mean-token-mean` and takes tokens that a rule on tokens
    rejects out of sigma_i; here they stay in it. Source: GSPO (arXiv 2507.18071).

    When: as `gspo`, when advantages differ within an answer.
    """
    require(clip_low >= 0 and clip_high >= 0, "gspo_token", "both >= 0", clip_low=clip_low, clip_high=clip_high)
    keep, advantages = inputs.keep, inputs.advantages
    level = over_tokens(row_mean(clamp_log_ratio(log_ratio.detach()), inputs.counted), keep)
    ratio = (level + log_ratio - log_ratio.detach()).clamp(max=10.0).exp()
    free, clipped = -advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    metrics = summable.fraction("pg_clipfrac", clipped > free, keep)
    return TokenLoss(torch.maximum(free, clipped) * inputs.weights, metrics)
