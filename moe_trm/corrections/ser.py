"""Sequence error rate: how far, on average, the ratios of a row are from 1."""

from __future__ import annotations

from torch import Tensor

from moe_trm.corrections.decision import check_positive, keep_rows
from moe_trm.corrections.evidence import Evidence, RowDecision
from moe_trm.corrections.row_scores import divergence_score
from moe_trm.corrections.rule import rule


@rule(ratio="total", scope="sequence", calibrate=lambda quantile: {"max_score": quantile})
def ser(evidence: Evidence, log_ratio: Tensor, *, max_score: float) -> RowDecision:
    """SER: keep row i iff mean_t |w_t - 1| <= max_score.

    E_mu[SER] is twice the average total variation of the row's contexts. Neutral to length in expectation; its spread
    shrinks as 1 / sqrt(T), so short rows are rejected a little more often. `max_score` has no published value and no
    default. `trm` with `score: ser` is the same and has the exact divergence.
    Source: sequence error rate of Trust Region Masking (arXiv 2512.23075).

    When: one threshold should mean the same for short and long answers, and ratios in both directions count alike.
    """
    check_positive("ser", "max_score", max_score)
    score = divergence_score("ser", evidence, log_ratio)
    return keep_rows(score <= max_score, score)
