"""Truncated importance sampling: weight tokens by how much likelier the learner finds them, up to a cap."""

from __future__ import annotations

import math
from dataclasses import replace

from torch import Tensor

from moe_trm.corrections.decision import check_band, check_positive, weigh, weigh_rows
from moe_trm.corrections.evidence import Correction, Evidence, RowDecision
from moe_trm.corrections.rule import rule
from moe_trm.ratios import clamp_log_ratio


@rule(ratio="engine", scope="token", calibrate=lambda quantile: {"cap": math.exp(quantile)}, weighs=True)
def token_tis(evidence: Evidence, log_ratio: Tensor, *, cap: float = 2.0, floor: float = 0.0) -> Correction:
    """Token-level truncated importance sampling: w_t = clip(rho_t, floor, cap).

    rho_t is the ratio read (default: engine). Keeps every token; biased by truncation, low variance. Neutral to length.
    `cap` 1.5-5 is usual, 2 the field's default. A `target_reject_rate` chooses the cap that truncates this share.
    Source: truncated importance sampling as in verl, slime and AReaL.

    When: the engines agree up to small noise and a gradient with little bias matters more than a guarantee; the first
    correction to try.
    """
    check_band("token_tis", floor, cap)
    clamped = clamp_log_ratio(log_ratio)
    return replace(weigh(clamped.exp().clamp(floor, cap), evidence.mask), score=clamped)


@rule(ratio="engine", scope="sequence", calibrate=lambda quantile: {"cap": math.exp(quantile)}, weighs=True)
def seq_tis(evidence: Evidence, log_ratio: Tensor, *, cap: float = 2.0) -> RowDecision:
    """Sequence-level truncated importance sampling: w_i = min(exp(sum_t log rho_t), cap) on every token of row i.

    Unbiased below the cap, but the product leaves 1 exponentially with length: expect it to saturate on long rows.
    The sum, not its terms, is clamped to +-20 nats. A `target_reject_rate` chooses the cap that truncates this share of
    rows.
    Source: truncated importance sampling as in verl, slime and AReaL.

    When: answers are short (some hundred tokens) and the gradient should be that of whole answers; on long ones see
    `score` and prefer `token_tis`.
    """
    check_positive("seq_tis", "cap", cap)
    total = clamp_log_ratio(log_ratio.sum(dim=1))
    return replace(weigh_rows(total.exp().clamp(max=cap)), score=total)
