"""The ratio loss of rollouts drawn from a mixture of policy and teacher: capped above, free below."""

from __future__ import annotations

from torch import Tensor

from moe_trm.losses.checks import require
from moe_trm.losses.inputs import LossInputs, TokenLoss
from moe_trm.losses.loss import loss
from moe_trm.methods import summable
from moe_trm.ratios import clamp_log_ratio


@loss(aggregation="token-mean", ratio="total")
def capped_ratio(inputs: LossInputs, log_ratio: Tensor, *, cap: float = 3.0) -> TokenLoss:
    """Capped ratio: X = -W A min(w, cap), w the total ratio; no gradient above the cap, whatever the sign of A, and no
    lower clip.

    Meant for rollouts sampled from fused logits, share z_teacher + (1 - share) z_policy: the engine then reports
    log-probs of the mixture, so that w is the ratio to what really sampled. Metric: `capped_fraction` of kept tokens.
    Source: logit fusion of teacher and student.

    When: a teacher helps to sample what the policy alone would not find.
    """
    require(cap > 0, "capped_ratio", "cap > 0", cap=cap)
    ratio = clamp_log_ratio(log_ratio).exp()
    metrics = summable.fraction("capped_fraction", ratio.detach() > cap, inputs.keep)
    return TokenLoss(-inputs.weights * inputs.advantages * ratio.clamp(max=cap), metrics)
