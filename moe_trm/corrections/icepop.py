"""IcePop: calibrate tokens on which both engines agree well enough, and let the others go."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from moe_trm.corrections.decision import check_band, weigh
from moe_trm.corrections.evidence import Correction, Evidence
from moe_trm.corrections.rule import rule
from moe_trm.errors import ConfigError
from moe_trm.ratios import clamp_log_ratio


@rule(
    ratio="engine",
    scope="token",
    calibrate=lambda quantile: {"low": math.exp(-quantile), "high": math.exp(quantile)},
    weighs=True,
)
def icepop(
    evidence: Evidence, log_ratio: Tensor, *, low: float = 0.5, high: float = 5.0, weight: str = "ratio"
) -> Correction:
    """IcePop: M(k_t) = k_t if low <= k_t <= high, else 0, for the engine ratio k_t. Both bounds belong to the band.

    The default band is Ring-1T's, which masks 1-2 per mille of tokens; above 10% look for the cause instead.
    `weight="one"` is the 0/1 form (no calibration). With `ratio="total"` and the `reinforce` loss it is the form that
    bands the full ratio.
    Source: IcePop (Ring-1T, arXiv 2510.18855); the total-ratio form is prime-rl's.

    When: an MoE policy has isolated tokens that routing or precision threw far off; cheap, and the usual first choice
    there.
    """
    check_band("icepop", low, high)
    if weight not in ("ratio", "one"):
        raise ConfigError("unknown weight form", where="correction icepop, weight", got=weight, expected="ratio, one")
    ratio = clamp_log_ratio(log_ratio).exp()
    keep = (ratio >= low) & (ratio <= high)
    decision = weigh(ratio if weight == "ratio" else torch.ones_like(ratio), evidence.mask, keep)
    return replace(decision, score=clamp_log_ratio(log_ratio).abs())
