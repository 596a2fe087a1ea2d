"""Geometric mask: drop rows whose tokens are, on average, off by too much."""

from __future__ import annotations

import math

from torch import Tensor

from moe_trm.corrections.decision import check_band, keep_rows
from moe_trm.corrections.evidence import Evidence, RowDecision
from moe_trm.corrections.rows import row_mean
from moe_trm.corrections.rule import rule
from moe_trm.ratios import clamp_log_ratio


@rule(
    ratio="engine",
    scope="sequence",
    calibrate=lambda quantile: {"low": math.exp(-quantile), "high": math.exp(quantile)},
)
def geometric_mask(evidence: Evidence, log_ratio: Tensor, *, low: float = 0.999, high: float = 1.001) -> RowDecision:
    """Keep row i iff low <= rho_geo <= high, rho_geo = exp(mean_t log rho_t), the geometric mean of the token ratios.

    Neutral to length: tiling a row leaves rho_geo unchanged. The default band is verl's; other sources use 0.99-1.01.
    Opposite errors cancel inside the mean. Source: masked importance sampling and geometric mask of verl and slime.

    When: whole answers drifted in one direction and lengths differ; beside a weight, never against isolated outliers,
    which the mean hides.
    """
    check_band("geometric_mask", low, high)
    average = row_mean(clamp_log_ratio(log_ratio), evidence.mask)
    geometric = average.exp()
    return keep_rows((geometric >= low) & (geometric <= high), average.abs())
