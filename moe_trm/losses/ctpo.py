"""CTPO: clip the cumulative prefix ratio within bounds that widen with position."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from moe_trm.corrections.rows import token_rank
from moe_trm.losses.checks import require
from moe_trm.losses.inputs import LossInputs, TokenLoss
from moe_trm.losses.loss import loss
from moe_trm.methods import summable
from moe_trm.ratios import clamp_log_ratio


@loss(aggregation="token-mean", scope="sequence")
def ctpo(
    inputs: LossInputs,
    log_ratio: Tensor,
    *,
    low: float = 0.025,
    high: float = 0.05,
    dual: float = 0.05,
    power: float = 0.5,
    form: Literal["cumulative", "geometric"] = "cumulative",
) -> TokenLoss:
    """CTPO: X = W max(-A e^l, -A e^{clip(l, -low n^p, high n^p)}), l = sg[c_t] + log pi - sg[log pi], c_t = sum_{u <=
    t} log r_u.

    n = 1..T_i is the token's rank among the sampled tokens, kept or not; for A < 0 the loss is capped at -A e^{dual
    n^p}. `form="geometric"` uses c_t / n, usually with `power=-0.5`. The gradient passes through the current token
    alone; l is capped at 10. Source: CTPO, as in horizon-llm/CTPO.

    When: long answers, where a token's clip should depend on all that came before it.
    """
    require(min(low, high, dual) >= 0, "ctpo", "low, high, dual >= 0", low=low, high=high, dual=dual)
    advantages, rank = inputs.advantages, token_rank(inputs.counted).clamp(min=1).to(log_ratio.dtype)
    prefix = clamp_log_ratio(log_ratio.detach()).cumsum(dim=1)
    level = prefix / rank if form == "geometric" else prefix
    log_prefix = (level + log_ratio - log_ratio.detach()).clamp(max=10.0)
    width = rank**power
    free = -advantages * log_prefix.exp()
    clipped = -advantages * torch.minimum(torch.maximum(log_prefix, -low * width), high * width).exp()
    values = torch.maximum(free, clipped)
    values = torch.where(advantages < 0, torch.minimum(values, -advantages * (dual * width).exp()), values)
    return TokenLoss(values * inputs.weights, summable.fraction("pg_clipfrac", clipped > free, inputs.keep))
