"""DPPO: mask by the divergence of the sampled token, not by its ratio."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_trm.losses.checks import require
from moe_trm.losses.inputs import LossInputs, TokenLoss
from moe_trm.losses.loss import loss
from moe_trm.methods import summable
from moe_trm.ratios import clamp_log_ratio


@loss(aggregation="token-mean", ratio="total")
def dppo_tv(
    inputs: LossInputs, log_ratio: Tensor, *, bound_low: float = 0.15, bound_high: float = 0.15, cap: float = 20.0
) -> TokenLoss:
    """DPPO-TV: X = -W m sg[min(p / q, cap)] A log p; A > 0 keeps p - q <= bound_high, A <= 0 keeps p - q >= -bound_low.

    p is the policy's probability of the token, q the anchor's: the rollout by default, the proximal policy with
    `ratio="update"`. Source: DPPO (arXiv 2602.04879), with the defaults of Stable-RL.

    When: a ratio clip drops unlikely tokens for tiny changes and lets likely ones move a lot; bounds the change of
    probability instead.
    """
    require(
        min(bound_low, bound_high, cap) > 0, "dppo_tv", "all > 0", bound_low=bound_low, bound_high=bound_high, cap=cap
    )
    p, q = _probabilities(inputs, log_ratio)
    keep = torch.where(inputs.advantages > 0, p - q <= bound_high, p - q >= -bound_low)
    return _masked(inputs, log_ratio, keep, cap)


@loss(aggregation="token-mean", ratio="total")
def dppo_kl(
    inputs: LossInputs, log_ratio: Tensor, *, bound_low: float = 0.05, bound_high: float = 0.05, cap: float = 20.0
) -> TokenLoss:
    """DPPO-KL: as `dppo_tv` with b = q log(q / p) + (1 - q) log((1 - q) / (1 - p)), the KL of "this token or another".

    A > 0 keeps b <= bound_high or p <= q; A <= 0 keeps b <= bound_low or p >= q. 1e-8 is added to both complements.
    Source: DPPO (arXiv 2602.04879), with the defaults of Stable-RL.

    When: as `dppo_tv`, measured in KL: stricter for tokens that were unlikely.
    """
    require(
        min(bound_low, bound_high, cap) > 0, "dppo_kl", "all > 0", bound_low=bound_low, bound_high=bound_high, cap=cap
    )
    p, q = _probabilities(inputs, log_ratio)
    binary = -q * log_ratio.detach() + (1 - q) * ((1 - q + 1e-8) / (1 - p + 1e-8)).log()
    keep = torch.where(inputs.advantages > 0, (binary <= bound_high) | (p <= q), (binary <= bound_low) | (p >= q))
    return _masked(inputs, log_ratio, keep, cap)


def _probabilities(inputs: LossInputs, log_ratio: Tensor) -> tuple[Tensor, Tensor]:
    current = inputs.current_logprobs.detach()
    return current.exp(), (current - log_ratio.detach()).clamp(max=0.0).exp()


def _masked(inputs: LossInputs, log_ratio: Tensor, keep: Tensor, cap: float) -> TokenLoss:
    weight = torch.where(keep, clamp_log_ratio(log_ratio.detach()).exp().clamp(max=cap), 0.0)
    values = -inputs.weights * weight * inputs.advantages * inputs.current_logprobs
    return TokenLoss(values, summable.fraction("pg_clipfrac", ~keep, inputs.keep))
