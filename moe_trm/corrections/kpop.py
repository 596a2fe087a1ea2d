"""KPop: tokens on which both engines agree, as a bet on this token or any other. Shape letters: B rows, T tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from moe_trm.corrections.decision import check_positive, weigh
from moe_trm.corrections.evidence import Correction, Evidence
from moe_trm.corrections.rule import rule
from moe_trm.ratios import clamp_log_ratio

SURE = 1e-6
"""Probabilities are read between this and 1 minus this: being sure is not infinitely far from being nearly sure."""


@rule(
    ratio="engine",
    scope="token",
    calibrate=lambda quantile: {"max_kl": quantile},
    weighs=True,
    readable=("engine", "merged", "total"),
)
def kpop(
    evidence: Evidence, log_ratio: Tensor, *, max_kl: float = 0.1, weight: Literal["one", "ratio"] = "one"
) -> Correction:
    """KPop: keep token t iff D(p || q) <= max_kl and D(q || p) <= max_kl, q its probability in the rollout and p the
    learner's, D(p || q) = p log(p / q) + (1 - p) log((1 - p) / (1 - q)).

    The KL of "this token or another", in both directions: a band on the ratio that is wide for unlikely tokens and
    tight for likely ones. A fixed band drops unlikely tokens over small differences, and keeps likely ones as the
    engines drift apart; here the masked share grows with the gap. 0.1 is the published bound; 20-35% of tokens were
    masked there, where IcePop masks 1-2 per mille. `weight="ratio"` multiplies what is kept by its ratio, as IcePop
    and AReaL do; `one` is the published mask. p is q times the ratio read: `engine`, `merged` or `total`, the ratios to
    the rollout. Probabilities are over the recorded support where there is one.
    Source: KPop (J. Guo et al., Taming Training-Inference Mismatch with Adaptive Masking Regions, 2026), as in AReaL.

    When: IcePop masks ever less while the gap between the engines grows, or masks mostly unlikely tokens.
    """
    check_positive("kpop", "max_kl", max_kl)
    rollout = evidence.ratios.rollout_logprobs
    score = bidirectional_binary_kl(rollout + log_ratio, rollout)
    keep = (score <= max_kl) & log_ratio.isfinite()
    ratio = clamp_log_ratio(log_ratio).exp()
    decision = weigh(ratio if weight == "ratio" else torch.ones_like(ratio), evidence.mask, keep)
    return replace(decision, score=torch.where(log_ratio.isfinite(), score, torch.inf))


def bidirectional_binary_kl(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """max(D(p || q), D(q || p)) of the two-way split "this token or another", elementwise, in nats."""
    p, q = (values.double().exp().clamp(SURE, 1 - SURE) for values in (logprobs, other_logprobs))
    this, log_complement_ratio = (p / q).log(), ((1 - p) / (1 - q)).log()
    larger = torch.maximum(p * this + (1 - p) * log_complement_ratio, -q * this - (1 - q) * log_complement_ratio)
    return larger.to(logprobs.dtype)
