"""PPO on the ratio of each turn."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from moe_trm.corrections.rows import over_tokens, row_sum
from moe_trm.losses.checks import require
from moe_trm.losses.inputs import LossInputs, TokenLoss
from moe_trm.losses.loss import loss
from moe_trm.methods import summable
from moe_trm.ratios import clamp_log_ratio


@loss(aggregation="token-mean", scope="sequence", experimental=True)
def turn_ppo(
    inputs: LossInputs,
    log_ratio: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    turn_ratio: Literal["geometric", "product"] = "geometric",
    normalize: Literal["off", "row"] = "off",
) -> TokenLoss:
    """Turn-level PPO: X = W max(-A_k sigma_k, -A_k clip(sigma_k, 1 - clip_low, 1 + clip_high)) / max(1, b_i).

    sigma_k = exp(mean_{t in k} log r), or with `turn_ratio="product"` exp(sum_{t in k} log r), whose sum is clamped to
    +-20. A_k is the turn's mean advantage; each of its tokens carries X, so turns count by their tokens. Without turn
    ids a row is one turn.

    b_i = 1, unless `normalize="row"`: the clipping bias of the row, sum_t |sigma - clip(sigma)| |A| over eps sum_t |A|,
    eps the mean of both clips, detached. So a row far beyond its clip counts less, and others are as they were:
    ST-PPO's clipping-bias correction, which normalises gradients by the bias where clipping sets in. `clip_bias_scale`
    is the mean of 1 / max(1, b_i). Whether the published bias is of a row or of the batch, and its form, is
    not established. Source: ST-PPO (arXiv 2511.20718), turn-level PPO.

    When: several turns with tools; one ratio for each turn. The product is the ratio of the whole turn as an action,
    and saturates on long turns.
    """
    require(clip_low >= 0 and clip_high >= 0, "turn_ppo", "both >= 0", clip_low=clip_low, clip_high=clip_high)
    keep, width = inputs.keep, (clip_low + clip_high) / 2
    require(normalize == "off" or width > 0, "turn_ppo", "a clip above 0 to normalise by", normalize=normalize)
    clamped = clamp_log_ratio(log_ratio)
    if turn_ratio == "product":
        ratio = clamp_log_ratio(_by_turn(clamped, inputs, mean=False)).exp()
    else:
        ratio = _by_turn(clamped, inputs).exp()
    advantages = _by_turn(inputs.advantages, inputs)
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    free, clipped = -advantages * ratio, -advantages * bounded
    values = torch.maximum(free, clipped) * inputs.weights
    metrics = summable.fraction("pg_clipfrac", clipped > free, keep)
    if normalize == "row":
        excess = ((ratio - bounded) * advantages).detach().abs()
        weight = width * row_sum(advantages.abs(), inputs.counted)
        bias = row_sum(excess, inputs.counted) / torch.where(weight > 0, weight, 1.0)
        scale = over_tokens(1 / bias.clamp(min=1.0), keep)
        values = values * scale
        metrics |= summable.mean("clip_bias_scale", scale, keep)
    return TokenLoss(values, metrics)


def _by_turn(values: Tensor, inputs: LossInputs, *, mean: bool = True) -> Tensor:
    """`[B, T]` mean, or sum, of `values` over the sampled tokens of each token's turn."""
    counted = inputs.counted
    turns = (
        torch.zeros_like(counted, dtype=torch.int64)
        if inputs.turn_ids is None
        else torch.where(counted, inputs.turn_ids.long(), 0)
    )
    num_turns = int(turns.max()) + 1 if turns.numel() else 1
    empty = values.new_zeros(len(values), num_turns)
    sums = empty.scatter_add(1, turns, torch.where(counted, values, 0.0))
    counts = empty.scatter_add(1, turns, counted.to(values.dtype)) if mean else torch.ones_like(empty)
    return (sums / counts.clamp(min=1)).gather(1, turns)
