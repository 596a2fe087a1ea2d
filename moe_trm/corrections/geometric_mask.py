"""Geometric mask: drop rows whose tokens are, on average, off by too much."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from moe_trm.corrections.decision import check_band, exponential, keep_rows
from moe_trm.corrections.evidence import Evidence, RowDecision
from moe_trm.corrections.row_scores import NO_SIGN, Score, check_score, signed_score, unscored
from moe_trm.corrections.rule import rule


@rule(
    ratio="engine",
    scope="sequence",
    calibrate=lambda quantile: {"low": exponential(-quantile), "high": exponential(quantile)},
)
def geometric_mask(
    evidence: Evidence,
    log_ratio: Tensor,
    *,
    low: float = 0.999,
    high: float = 1.001,
    score: Score = "mean",
    ln_delta: float | None = None,
) -> RowDecision:
    """Keep row i iff low <= rho_geo <= high, rho_geo = exp(mean_t log rho_t), the geometric mean of the token ratios.

    Neutral to length: tiling a row leaves rho_geo unchanged. The default band is verl's; other sources use 0.99-1.01.
    Opposite errors cancel inside the mean. `score` takes another reduction of log rho than the mean: `max` (the token
    farthest from 1), `sum` (the product) or `ln`; not `ser`, which has no sign.
    Source: masked importance sampling and geometric mask of verl and slime.

    When: whole answers drifted in one direction and lengths differ; beside a weight, never against isolated outliers,
    which the mean hides.
    """
    check_band("geometric_mask", low, high)
    check_score("geometric_mask", score, ln_delta, impossible={"ser": NO_SIGN})
    log_row = signed_score(score, evidence, log_ratio, ln_delta)
    row_ratio = log_row.exp()
    decision = keep_rows((row_ratio >= low) & (row_ratio <= high), log_row.abs())
    return replace(decision, metrics=unscored(score, evidence))
