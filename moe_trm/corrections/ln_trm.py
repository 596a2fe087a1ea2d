"""Length-neutral trust-region masking: deviations count by how many tokens still follow them."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from moe_trm.corrections.decision import check_positive, keep_rows
from moe_trm.corrections.evidence import Evidence, RowDecision
from moe_trm.corrections.row_scores import divergence_score, unscored
from moe_trm.corrections.rule import rule


@rule(ratio="total", scope="sequence", calibrate=lambda quantile: {"max_score": quantile})
def ln_trm(evidence: Evidence, log_ratio: Tensor, *, delta: float, max_score: float) -> RowDecision:
    """LN-TRM: keep row i iff S_i / W_i <= max_score.

    S_i = sum_t omega_t |w_t - 1|,  W_i = sum_t omega_t,  omega_t = min(1, sqrt(delta (T_i - t) / 2)),
    t = 1..T_i counts sampled tokens and `delta` (nats) is the assumed bound of the token KL.

    An early deviation shifts every later context, so it weighs more. The last token weighs nothing and late ones
    little: pair the rule with `trm_max`, `token_veto` or `ser`. One-token rows have W = 0; they score 0, are kept, and
    are counted in `unscored_fraction`. Whether the published score carries a factor 2 is unknown; without it
    `max_score` is on the scale of `ser`. Neither threshold has a published value or a default. `trm` with `score: ln`
    is the same and has the exact divergence. Source: length-neutral Trust Region Masking (arXiv 2512.23075).

    When: answers are long and errors at their beginning matter more than at their end.
    """
    check_positive("ln_trm", "delta", delta)
    check_positive("ln_trm", "max_score", max_score)
    score = divergence_score("ln", evidence, log_ratio, ln_delta=delta)
    return replace(keep_rows(score <= max_score, score), metrics=unscored("ln", evidence))
