"""Masked importance sampling: weight by the ratio inside a band, drop what lies outside."""

from __future__ import annotations

import math
from dataclasses import replace

from torch import Tensor

from moe_trm.corrections.decision import check_band, exponential, weigh, weigh_rows
from moe_trm.corrections.evidence import Correction, Evidence, RowDecision
from moe_trm.corrections.row_scores import reduced
from moe_trm.corrections.rule import rule
from moe_trm.ratios import clamp_log_ratio


@rule(
    ratio="engine",
    scope="token",
    calibrate=lambda quantile: {"low": math.exp(-quantile), "high": math.exp(quantile)},
    weighs=True,
)
def token_mis(evidence: Evidence, log_ratio: Tensor, *, low: float = 0.5, high: float = 2.0) -> Correction:
    """Token-level masked importance sampling: w_t = rho_t if low <= rho_t <= high, else the token is dropped.

    IcePop is the same function with the wider band 0.5-5. Source: masked importance sampling and geometric mask of verl
    and slime.

    When: single tokens are far off and should not train at all, the rest reweighted.
    """
    check_band("token_mis", low, high)
    clamped = clamp_log_ratio(log_ratio)
    ratio = clamped.exp()
    return replace(weigh(ratio, evidence.mask, (ratio >= low) & (ratio <= high)), score=clamped.abs())


@rule(
    ratio="engine",
    scope="sequence",
    calibrate=lambda quantile: {"low": exponential(-quantile), "high": exponential(quantile)},
    weighs=True,
)
def seq_mis(evidence: Evidence, log_ratio: Tensor, *, low: float = 0.5, high: float = 2.0) -> RowDecision:
    """Sequence-level masked importance sampling: w_i = rho_i if low <= rho_i <= high, else row i is dropped; rho_i =
    prod_t rho_t.

    `low=0` gives the one-sided form. Biased against long rows, as every product is. Source: masked importance sampling
    and geometric mask of verl and slime.

    When: as `seq_tis`, but where rows that would be capped should not train.
    """
    check_band("seq_mis", low, high)
    total = clamp_log_ratio(reduced(log_ratio, evidence, "sum"))
    ratio = total.exp()
    return replace(weigh_rows(ratio, (ratio >= low) & (ratio <= high)), score=total.abs())
