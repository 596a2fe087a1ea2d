"""PPO on the geometric-mean ratio of each turn."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_trm import summable
from moe_trm.losses.checks import require
from moe_trm.losses.inputs import LossInputs, TokenLoss
from moe_trm.losses.loss import loss
from moe_trm.ratios import clamp_log_ratio


@loss(aggregation="token-mean", scope="sequence", experimental=True)
def turn_ppo(inputs: LossInputs, log_ratio: Tensor, *, clip_low: float = 0.2, clip_high: float = 0.2) -> TokenLoss:
    """Turn-level PPO: X = W max(-A_k sigma_k, -A_k clip(sigma_k, 1 - clip_low, 1 + clip_high)), sigma_k = exp(mean_{t
    in k} log r).

    A_k is the turn's mean advantage; each of its tokens carries X, so turns count by their tokens. Without turn ids a
    row is one turn. The normalisation that ST-PPO adds when clipping sets in is not established and left out.
    Source: ST-PPO, turn-level PPO.

    When: several turns with tools; one ratio for each turn.
    """
    require(clip_low >= 0 and clip_high >= 0, "turn_ppo", "both >= 0", clip_low=clip_low, clip_high=clip_high)
    keep = inputs.keep
    ratio = _turn_mean(clamp_log_ratio(log_ratio), inputs).exp()
    advantages = _turn_mean(inputs.advantages, inputs)
    free, clipped = -advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    metrics = summable.fraction("pg_clipfrac", clipped > free, keep)
    return TokenLoss(torch.maximum(free, clipped) * inputs.weights, metrics)


def _turn_mean(values: Tensor, inputs: LossInputs) -> Tensor:
    """`[B, T]` mean of `values` over the sampled tokens of each token's turn."""
    counted = inputs.counted
    turns = (
        torch.zeros_like(counted, dtype=torch.int64)
        if inputs.turn_ids is None
        else torch.where(counted, inputs.turn_ids.long(), 0)
    )
    num_turns = int(turns.max()) + 1 if turns.numel() else 1
    empty = values.new_zeros(len(values), num_turns)
    sums = empty.scatter_add(1, turns, torch.where(counted, values, 0.0))
    counts = empty.scatter_add(1, turns, counted.to(values.dtype))
    return (sums / counts.clamp(min=1)).gather(1, turns)
