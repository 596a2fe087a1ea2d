"""DRO: policy gradient with a quadratic penalty on the log-ratio."""

from __future__ import annotations

from torch import Tensor

from moe_trm.losses.checks import require
from moe_trm.losses.inputs import LossInputs, TokenLoss
from moe_trm.losses.loss import loss
from moe_trm.ratios import clamp_log_ratio


@loss(aggregation="token-mean")
def dro(inputs: LossInputs, log_ratio: Tensor, *, beta: float = 0.1) -> TokenLoss:
    """DRO: X = -W (A log pi_theta - beta / 2 (log r)^2). Source: DRO, as in verl.

    When: offline data without a trusted trust region; a quadratic penalty instead of a clip.
    """
    require(beta > 0, "dro", "> 0", beta=beta)
    penalty = beta / 2 * clamp_log_ratio(log_ratio) ** 2
    return TokenLoss(-inputs.weights * (inputs.advantages * inputs.current_logprobs - penalty), {})
