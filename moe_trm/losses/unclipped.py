"""The surrogate without a clip."""

from __future__ import annotations

from torch import Tensor

from moe_trm.losses.inputs import LossInputs, TokenLoss
from moe_trm.losses.loss import loss
from moe_trm.ratios import clamp_log_ratio


@loss(aggregation="token-mean")
def unclipped(inputs: LossInputs, log_ratio: Tensor) -> TokenLoss:
    """Unclipped surrogate: X = -W A r, r = exp(log_update).

    With the `m2po` correction it is M2PO, with `trm_max` on `ratio="total"` it is the trust-region masked surrogate:
    the mask does what a clip would do. The surrogate of that paper sums over tokens and divides by all rows, which is
    `loss.aggregation=seq-mean-token-sum`. Source: Trust Region Masking (arXiv 2512.23075), M2PO (2510.01161).

    When: a rule such as `m2po` or `trm_max` is the trust region already.
    """
    return TokenLoss(-inputs.weights * inputs.advantages * clamp_log_ratio(log_ratio).exp(), {})
