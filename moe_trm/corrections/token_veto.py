"""Token veto: one token the learner finds next to impossible condemns its row."""

from __future__ import annotations

import math
from dataclasses import replace

from torch import Tensor

from moe_trm import summable
from moe_trm.corrections.decision import check_positive, keep_rows
from moe_trm.corrections.evidence import Evidence, RowDecision
from moe_trm.corrections.rows import row_min
from moe_trm.corrections.rule import rule


@rule(ratio="engine", scope="sequence", calibrate=lambda quantile: {"min_ratio": math.exp(-quantile)})
def token_veto(evidence: Evidence, log_ratio: Tensor, *, min_ratio: float = 1e-4) -> RowDecision:
    """Keep row i iff min_t rho_t >= min_ratio (WTRS). One-sided: large ratios never veto.

    Compared as logarithms, before any clamp. Defaults in use: 1e-4 (verl, slime), 1e-5 (INTELLECT-3). Source: token
    veto of verl and slime; WTRS (INTELLECT-3).

    When: a single impossible token means that the record is broken (another template, a wrong weight version); beside
    any other rule.
    """
    check_positive("token_veto", "min_ratio", min_ratio)
    lowest = row_min(log_ratio, evidence.mask)
    decision = keep_rows(lowest >= math.log(min_ratio), -lowest)
    catastrophic = summable.fraction("catastrophic_token_fraction", ~(log_ratio >= math.log(min_ratio)), evidence.mask)
    return replace(decision, metrics={**decision.metrics, **catastrophic})
