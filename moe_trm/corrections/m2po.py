"""M2PO's second-moment mask: drop the few tokens that spend the divergence budget in the harmful direction."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from moe_trm.corrections.decision import check_positive, weigh
from moe_trm.corrections.evidence import Correction, Evidence
from moe_trm.corrections.rule import rule
from moe_trm.methods import summable
from moe_trm.ratios import clamp_log_ratio


@rule(ratio="total", scope="batch")
def m2po(
    evidence: Evidence, log_ratio: Tensor, *, budget: float = 0.04, over: Literal["all", "harmful"] = "all"
) -> Correction:
    """Drop the tokens with the largest (log w)^2 until its mean over the rest, M2, is below `budget`.

    M2 bounds the divergence of what is kept, chi2 <= max(1, max w)^2 M2. `over="harmful"` counts and drops harmful
    tokens alone, A > 0 with w > 1 or A < 0 with w < 1, as the released code does: no other token is dropped, M2 of all
    that is kept may be above `budget`, and the bound does not follow.

    If no subset reaches the budget, the one token with the smallest (log w)^2 stays. The statistic is of the whole
    minibatch, so it must be computed before the batch is cut into micro-batches. A token whose ratio is NaN is dropped.
    The paper reads the ratio to the behaviour policy; `ratio="staleness"` is the official code's. Budget 0.04 is the
    paper's. It bounds a mean over what is kept, so no token has a score of its own: `target_reject_rate` cannot choose
    it. Source: M2PO (arXiv 2510.01161).

    When: rollouts are tens of versions old and a fixed clip would drop most of what can be learned.
    """
    check_positive("m2po", "budget", budget)
    x, mask = clamp_log_ratio(log_ratio), evidence.mask
    valid, harmful = mask & ~x.isnan(), x * evidence.advantages.sign() > 0
    counted = valid & harmful if over == "harmful" else valid
    moments = torch.where(counted, x**2, 0.0)
    position = counted.flatten().nonzero()[:, 0]
    order = torch.argsort(moments.flatten()[position], stable=True)
    ascending = moments.flatten()[position][order].double()
    running = ascending.cumsum(0) / torch.arange(1, len(ascending) + 1, device=x.device)
    kept_count = (running < budget).sum().clamp(min=1)
    dropped = position[order][torch.arange(len(order), device=x.device) >= kept_count]
    keep = valid.flatten().index_fill(0, dropped, False).view_as(mask)
    return weigh(torch.ones_like(x), mask, keep, summable.mean("score", moments, counted))
