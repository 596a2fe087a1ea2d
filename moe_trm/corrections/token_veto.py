"""Token veto: one token the learner finds next to impossible condemns its row."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from moe_trm.corrections.decision import check_positive, exponential, keep_rows, logarithm
from moe_trm.corrections.evidence import Evidence, RowDecision
from moe_trm.corrections.row_scores import NO_RATIO, Score, check_score, drop_score, reduced, unscored
from moe_trm.corrections.rows import over_tokens
from moe_trm.corrections.rule import rule
from moe_trm.methods import summable


@rule(ratio="engine", scope="sequence", calibrate=lambda quantile: {"min_ratio": exponential(-quantile)})
def token_veto(
    evidence: Evidence,
    log_ratio: Tensor,
    *,
    min_ratio: float = 1e-4,
    score: Score = "max",
    ln_delta: float | None = None,
) -> RowDecision:
    """Keep row i iff min_t rho_t >= min_ratio (WTRS). One-sided: large ratios never veto.

    Compared as logarithms, before any clamp. Defaults in use: 1e-4 (verl, slime), 1e-5 (INTELLECT-3). `score` takes
    another reduction of -log rho than the maximum: `mean` keeps rows with exp(mean_t log rho_t) >= min_ratio; `sum` and
    `ln` likewise; not `ser`, which is no logarithm of a ratio.
    Source: token veto of verl and slime; WTRS (INTELLECT-3).

    When: a single impossible token means that the record is broken (another template, a wrong weight version); beside
    any other rule.
    """
    check_positive("token_veto", "min_ratio", min_ratio)
    check_score("token_veto", score, ln_delta, impossible={"ser": NO_RATIO})
    mask, least = evidence.mask, logarithm(min_ratio)
    if score != "max":
        drop = drop_score(score, evidence, log_ratio, ln_delta=ln_delta)
        return replace(keep_rows(-drop >= least, drop), metrics=unscored(score, evidence))
    drop = reduced(-log_ratio, evidence, "max")
    least_of_token = over_tokens(least, mask) if isinstance(least, Tensor) else least
    catastrophic = summable.fraction("catastrophic_token_fraction", ~(log_ratio >= least_of_token), mask)
    return replace(keep_rows(-drop >= least, drop), metrics=catastrophic)
