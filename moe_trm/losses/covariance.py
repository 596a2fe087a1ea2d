"""Filters on the covariance of log-prob and advantage, which drives entropy down."""

from __future__ import annotations

import hashlib
from typing import Literal

import torch
from torch import Tensor

from moe_trm.losses.checks import require
from moe_trm.losses.inputs import LossInputs, TokenLoss
from moe_trm.losses.loss import loss
from moe_trm.methods import summable
from moe_trm.ratios import clamp_log_ratio


@loss(aggregation="token-mean", scope="batch")
def kl_cov(
    inputs: LossInputs,
    log_ratio: Tensor,
    *,
    share: float = 2e-4,
    beta: float = 1.0,
    penalty: Literal["abs", "kl"] = "abs",
) -> TokenLoss:
    """KL-cov: X = -W A r, plus beta D on the `share` of tokens (at least one) with the largest covariance.

    cov = (A - mean A)(log pi - mean log pi) over the minibatch, detached. Unclipped. `penalty="abs"`: D = |log r|, as
    the released code approximates it. `penalty="kl"`: D = r - 1 - log r, which over samples of the policy before the
    update has mean KL(pi_prox || pi_theta) and its gradient (equation 14 of the paper). Equal ones are drawn by the
    run's seed and step, so that the share is never exceeded.
    Source: KL-cov and clip-cov (arXiv 2505.22617), as in verl.

    When: entropy collapses early; holds back the tokens that drive it with a penalty.
    """
    require(0 < share <= 1 and beta >= 0, "kl_cov", "0 < share <= 1, beta >= 0", share=share, beta=beta)
    keep, x = inputs.keep, clamp_log_ratio(log_ratio)
    covariance = _covariance(inputs)
    count = min(max(1, int(share * int(keep.sum()))), keep.numel())
    kept = keep.flatten().nonzero()[:, 0]
    kept = kept[_shuffled(len(kept), inputs, 0).to(kept.device)]
    largest = kept[covariance.flatten()[kept].argsort(descending=True, stable=True)[:count]]
    is_largest = torch.zeros_like(keep).flatten().index_fill(0, largest, True).view_as(keep)
    distance = x.abs() if penalty == "abs" else x.expm1() - x
    values = -inputs.weights * inputs.advantages * x.exp() + torch.where(is_largest, beta * distance, 0.0)
    return TokenLoss(values, summable.fraction("cov_fraction", is_largest, keep))


@loss(aggregation="token-mean", scope="batch")
def clip_cov(
    inputs: LossInputs,
    log_ratio: Tensor,
    *,
    share: float = 2e-4,
    low: float = 1.0,
    high: float = 5.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    seed: float = 0,
) -> TokenLoss:
    """Clip-cov: PPO clip, with no loss on a random `share` of all tokens (at least one) among those with low < cov <
    high.

    Tokens that PPO clips already are no candidates. The choice is drawn by the run's seed, the step and `seed`: another
    one at each step, and the same one again.
    Source: KL-cov and clip-cov (arXiv 2505.22617), as in verl.

    When: entropy collapses early; drops a few tokens that drive it. Milder than `kl_cov`.
    """
    require(0 < share <= 1 and low < high, "clip_cov", "0 < share <= 1, low < high", share=share, low=low, high=high)
    keep, advantages = inputs.keep, inputs.advantages
    ratio = clamp_log_ratio(log_ratio).exp()
    free, clipped = -advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    candidates = clip_cov_candidates(inputs, clipped > free, low, high).flatten().nonzero()[:, 0]
    count = max(1, int(share * int(keep.sum())))
    order = _shuffled(len(candidates), inputs, int(seed))[:count]
    dropped = (
        torch.zeros_like(keep).flatten().index_fill(0, candidates[order.to(candidates.device)], True).view_as(keep)
    )
    values = torch.where(dropped, 0.0, torch.maximum(free, clipped))
    metrics = summable.fraction("pg_clipfrac", clipped > free, keep) | summable.fraction("cov_fraction", dropped, keep)
    return TokenLoss(values * inputs.weights, metrics)


def clip_cov_candidates(inputs: LossInputs, ppo_clipped: Tensor, low: float, high: float) -> Tensor:
    """`[B, T]` bool: kept tokens with low < covariance < high that PPO does not clip."""
    covariance = _covariance(inputs)
    return inputs.keep & (covariance > low) & (covariance < high) & ~ppo_clipped


def _shuffled(count: int, inputs: LossInputs, seed: int) -> Tensor:
    """A permutation of `count` places, drawn by the run's seed, the version of its weights, and `seed`."""
    digest = hashlib.blake2b(f"{inputs.draw} {seed}".encode(), digest_size=7).digest()
    return torch.randperm(count, generator=torch.Generator().manual_seed(int.from_bytes(digest, "big")))


def _covariance(inputs: LossInputs) -> Tensor:
    # In float64 equal advantages differ from their mean by nothing: rounding would make candidates of them.
    keep, logprobs, advantages = inputs.keep, inputs.current_logprobs.detach().double(), inputs.advantages.double()
    count = keep.sum().clamp(min=1)
    average = torch.where(keep, logprobs, 0.0).sum() / count
    mean_advantage = torch.where(keep, advantages, 0.0).sum() / count
    return torch.where(keep, (advantages - mean_advantage) * (logprobs - average), -torch.inf)
