"""Truncated importance sampling: weight tokens by how much likelier the learner finds them, up to a cap."""

from __future__ import annotations

from torch import Tensor

from moe_trm.corrections.decision import check_band, check_positive, weigh, weigh_rows
from moe_trm.corrections.evidence import Correction, Evidence, RowDecision
from moe_trm.corrections.rule import rule
from moe_trm.ratios import clamp_log_ratio


@rule(ratio="engine", scope="token")
def token_tis(evidence: Evidence, log_ratio: Tensor, *, cap: float = 2.0, floor: float = 0.0) -> Correction:
    """Token-level truncated importance sampling: w_t = clip(rho_t, floor, cap).

    rho_t is the ratio read (default: engine). Keeps every token; biased by truncation, low variance. Neutral to length.
    `cap` 1.5-5 is usual, 2 the field's default. Source: methods.md 2.1 (verl, slime).
    """
    check_band("token_tis", floor, cap)
    return weigh(clamp_log_ratio(log_ratio).exp().clamp(floor, cap), evidence.mask)


@rule(ratio="engine", scope="sequence")
def seq_tis(evidence: Evidence, log_ratio: Tensor, *, cap: float = 2.0) -> RowDecision:
    """Sequence-level truncated importance sampling: w_i = min(exp(sum_t log rho_t), cap) on every token of row i.

    Unbiased below the cap, but the product leaves 1 exponentially with length: expect it to saturate on long rows.
    The sum, not its terms, is clamped to +-20 nats. Source: methods.md 2.1.
    """
    check_positive("seq_tis", "cap", cap)
    weight = clamp_log_ratio(log_ratio.sum(dim=1)).exp().clamp(max=cap)
    return weigh_rows(weight)
