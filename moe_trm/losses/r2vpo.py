"""R2VPO: a penalty on the variance of the ratio in place of a clip."""

from __future__ import annotations

from torch import Tensor

from moe_trm import summable
from moe_trm.losses.checks import require
from moe_trm.losses.inputs import LossInputs, TokenLoss
from moe_trm.losses.loss import loss
from moe_trm.ratios import clamp_log_ratio


@loss(aggregation="token-mean", experimental=True)
def r2vpo(inputs: LossInputs, log_ratio: Tensor, *, penalty: float = 0.5) -> TokenLoss:
    """R2VPO: X = -W A r + penalty (r - 1)^2.

    The published form is not established: the abstract describes a variance constraint by a primal-dual method, which
    is this penalty with `penalty` following `next_penalty`; another source describes a clip range that follows the
    variance of each group. Source: R2VPO.

    When: a soft bound on ratios is wanted in place of a clip. Research.
    """
    require(penalty >= 0, "r2vpo", ">= 0", penalty=penalty)
    ratio = clamp_log_ratio(log_ratio).exp()
    deviation = (ratio - 1) ** 2
    values = -inputs.weights * inputs.advantages * ratio + penalty * deviation
    return TokenLoss(values, summable.mean("ratio_variance", deviation, inputs.keep))


def next_penalty(penalty: float, ratio_variance: float, *, target: float, rate: float) -> float:
    """Dual step: max(0, penalty + rate (variance - target))."""
    return max(0.0, penalty + rate * (ratio_variance - target))
