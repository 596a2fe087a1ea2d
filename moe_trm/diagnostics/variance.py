"""Proxies of the gradient's variance from log-probs alone. Shape letters: B rows, T tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from moe_trm.corrections.evidence import Correction, Evidence
from moe_trm.methods import summable


def gradient_power(evidence: Evidence, correction: Correction) -> summable.Summable:
    """`variance/total_power`: mean over rows of sum_t (w_t A_t)^2 (1 - p_t), summable.

    1 - p is an estimate of the squared norm of the score of a token's logits, |grad log p|^2 = 1 - 2 p + sum_v p_v^2,
    which needs no pass over the vocabulary: sampled from the policy, both have the same mean. p is the current policy's
    probability, w the weight of the correction (0 for what was dropped), A the advantage. Clipping is not in it.
    Source: the variance proxies of verl, whose sum_v p_v^2 is replaced.
    """
    current = evidence.ratios.rollout_logprobs + evidence.ratios.total.detach()
    pull = correction.weights.double() * evidence.advantages.detach()
    power = torch.where(correction.keep, pull**2 * -current.expm1().clamp(max=0), 0.0).sum(dim=1)
    return summable.mean("variance/total_power", power, evidence.mask.any(dim=1))


def gradient_noise(measured: Mapping[str, float], grad_norm: float, num_rows: float) -> dict[str, float]:
    """`variance/signal_strength` = |g|^2 and `variance/pure_noise` = max(0, (total power - |g|^2) / (N - 1)).

    The power is that of logits and rows, g the gradient of parameters and loss: what counts is their course over the
    run, not their size. Noise that grows after weights were switched on says that these cost more than they mend.
    Empty where the power was not measured, the norm is no number, or one row has no variance. Source: as above.

    Args:
        measured: finished metrics of the step.
        grad_norm: mean norm of the step's updates, before clipping.
        num_rows: N, rows of one update.
    """
    power, signal = measured.get("variance/total_power"), grad_norm**2
    if power is None or not math.isfinite(power + signal) or num_rows <= 1:
        return {}
    return {
        "variance/signal_strength": signal,
        "variance/pure_noise": max(0.0, (power - signal) / (num_rows - 1)),
    }
