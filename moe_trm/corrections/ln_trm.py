"""Length-neutral trust-region masking: deviations count by how many tokens still follow them."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from moe_trm import summable
from moe_trm.corrections.decision import check_positive, keep_rows
from moe_trm.corrections.evidence import Evidence, RowDecision
from moe_trm.corrections.rows import num_tokens, over_tokens, row_sum, token_rank
from moe_trm.corrections.rule import rule
from moe_trm.ratios import clamp_log_ratio


@rule(ratio="total", scope="sequence", calibrate=lambda quantile: {"max_score": quantile})
def ln_trm(evidence: Evidence, log_ratio: Tensor, *, delta: float, max_score: float) -> RowDecision:
    """LN-TRM: keep row i iff S_i / W_i <= max_score.

    S_i = sum_t omega_t |w_t - 1|,  W_i = sum_t omega_t,  omega_t = min(1, sqrt(delta (T_i - t) / 2)),
    t = 1..T_i counts sampled tokens and `delta` (nats) is the assumed bound of the token KL.

    An early deviation shifts every later context, so it weighs more. The last token weighs nothing and late ones
    little: pair the rule with `trm_max`, `token_veto` or `ser`. One-token rows have W = 0; they score 0, are kept, and
    are counted in `unscored_fraction`. Whether the published score carries a factor 2 is unknown; without it
    `max_score` is on the scale of `ser`. Neither threshold has a published value or a default. Source: length-neutral
    Trust Region Masking (arXiv 2512.23075).

    When: answers are long and errors at their beginning matter more than at their end.
    """
    check_positive("ln_trm", "delta", delta)
    check_positive("ln_trm", "max_score", max_score)
    mask = evidence.mask
    remaining = over_tokens(num_tokens(mask), mask) - token_rank(mask)
    omega = (remaining.clamp(min=0).to(log_ratio.dtype) * delta / 2).sqrt().clamp(max=1.0)
    total_weight = row_sum(omega, mask)
    deviation = row_sum(omega * clamp_log_ratio(log_ratio).expm1().abs(), mask)
    scored = total_weight > 0
    score = deviation / total_weight.where(scored, total_weight.new_ones(()))
    decision = keep_rows(score <= max_score, score)
    unscored = summable.fraction("unscored_fraction", ~scored, mask.any(dim=1))
    return replace(decision, metrics={**decision.metrics, **unscored})
