"""A correction and a loss of one's own. config.yaml names them; nothing in the library changes."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_trm.corrections import Correction, Evidence
from moe_trm.corrections.rule import rule
from moe_trm.losses import LossInputs, TokenLoss
from moe_trm.losses.loss import loss
from moe_trm.methods import summable


@rule(ratio="engine", scope="token", calibrate=lambda quantile: {"max_gap": quantile})
def negative_gap_mask(evidence: Evidence, log_ratio: Tensor, *, max_gap: float = 1.0) -> Correction:
    """Drop tokens of negative advantage where the engines disagree: keep_t = |log rho_t| <= max_gap or A_t >= 0.

    `log_ratio` and `evidence.advantages` are `[B, T]`; `max_gap` is in nats.
    """
    gap, judged = log_ratio.abs(), evidence.mask & (evidence.advantages < 0)
    keep = evidence.mask & ~(judged & (gap > max_gap))
    return Correction(weights=keep.to(log_ratio.dtype), keep=keep, metrics={}, score=gap, judged=judged)


@loss(aggregation="token-mean")
def leaky_clip(inputs: LossInputs, log_ratio: Tensor, *, clip: float = 0.2, leak: float = 0.1) -> TokenLoss:
    """PPO's clip with a slope of `leak` outside of it: X = -W min(A r, A (c + leak (r - c))).

    c = clamp(r, 1 - clip, 1 + clip). No token is without gradient, and `leak=0` is PPO. `log_ratio` is `[B, T]`, with
    gradient.
    """
    ratio = log_ratio.exp()
    clamped = ratio.clamp(1 - clip, 1 + clip)
    leaky = clamped + leak * (ratio - clamped)
    values = -torch.minimum(inputs.advantages * ratio, inputs.advantages * leaky) * inputs.weights
    return TokenLoss(values, summable.fraction("leaked_fraction", ratio != clamped, inputs.keep))
