"""ESPO: one ratio for each group of tokens of similar entropy."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_trm.corrections.rows import num_tokens, row_mean
from moe_trm.errors import ConfigError
from moe_trm.losses.checks import require
from moe_trm.losses.inputs import LossInputs, TokenLoss
from moe_trm.losses.loss import loss
from moe_trm.methods import summable
from moe_trm.ratios import clamp_log_ratio


@loss(aggregation="seq-mean-token-mean", scope="sequence", needs=("entropy",), experimental=True)
def espo(
    inputs: LossInputs, log_ratio: Tensor, *, num_bins: float = 4, clip_low: float = 0.2, clip_high: float = 0.2
) -> TokenLoss:
    """ESPO: PPO clip on sigma_b = exp(mean_{t in b} log r) of entropy bin b, with the clip width scaled by H_b / H.

    Bins are quantiles of predictive entropy within the row, H_b and H mean entropies of bin and row. Each token has
    sigma_b pi / sg[pi], so advantages may differ. One bin is GSPO-token; as many bins as tokens with equal entropies is
    token PPO. Grouping, number of bins and direction of the scaling are not established. Needs `entropy`. Source: ESPO.

    When: a row mixes certain and uncertain tokens and one sequence ratio is too coarse. Research.
    """
    require(
        num_bins >= 1 and clip_low >= 0 and clip_high >= 0,
        "espo",
        "num_bins >= 1, clips >= 0",
        num_bins=num_bins,
        clip_low=clip_low,
        clip_high=clip_high,
    )
    if inputs.entropy is None:
        raise ConfigError(
            "espo groups tokens by entropy", where="loss espo", got="no entropy", expected="entropy of shape [B, T]"
        )
    keep, counted, advantages = inputs.keep, inputs.counted, inputs.advantages
    entropy = torch.where(counted, inputs.entropy.detach().to(log_ratio.dtype), 0.0)
    bins = entropy_bins(entropy, counted, int(num_bins))
    level = _bin_mean(clamp_log_ratio(log_ratio.detach()), bins, counted, int(num_bins))
    ratio = (level + log_ratio - log_ratio.detach()).clamp(max=10.0).exp()
    average = row_mean(entropy, counted)[:, None]
    scale = torch.where(average > 0, _bin_mean(entropy, bins, counted, int(num_bins)) / average.clamp(min=1e-12), 1.0)
    bounded = torch.minimum(torch.maximum(ratio, 1 - clip_low * scale), 1 + clip_high * scale)
    free, clipped = -advantages * ratio, -advantages * bounded
    metrics = summable.fraction("pg_clipfrac", clipped > free, keep)
    return TokenLoss(torch.maximum(free, clipped) * inputs.weights, metrics)


def entropy_bins(entropy: Tensor, mask: Tensor, num_bins: int) -> Tensor:
    """`[B, T]` int64: bin 0..num_bins-1 of each token of `mask` by rank of its entropy within the row; arbitrary
    elsewhere.
    """
    rank = torch.where(mask, entropy, torch.inf).argsort(dim=1, stable=True).argsort(dim=1)
    return (rank * num_bins // num_tokens(mask).clamp(min=1)[:, None]).clamp(max=num_bins - 1)


def _bin_mean(values: Tensor, bins: Tensor, mask: Tensor, num_bins: int) -> Tensor:
    empty = values.new_zeros(len(values), num_bins)
    sums = empty.scatter_add(1, bins, torch.where(mask, values, 0.0))
    counts = empty.scatter_add(1, bins, mask.to(values.dtype))
    return (sums / counts.clamp(min=1)).gather(1, bins)
