"""Plain policy gradient, under the correction weights or none."""

from __future__ import annotations

from torch import Tensor

from moe_trm.losses.inputs import LossInputs, TokenLoss
from moe_trm.losses.loss import loss


@loss(aggregation="seq-mean-token-sum", ratio="total", holds="none")
def reinforce(inputs: LossInputs, log_ratio: Tensor) -> TokenLoss:
    """REINFORCE: X = -W A log pi_theta, with W the correction weights, detached.

    No ratio of its own and no clip: with importance weights on the total ratio it is the bypass objective. The gradient
    coefficient is W A. Source: REINFORCE; the `bypass_pg_*` presets are verl's.

    When: strictly on-policy data, or corrections on the total ratio (the `bypass_pg_*` presets).
    """
    return TokenLoss(-inputs.weights * inputs.advantages * inputs.current_logprobs, {})


@loss(aggregation="token-mean", ratio="total", holds="none")
def gpg(inputs: LossInputs, log_ratio: Tensor) -> TokenLoss:
    """GPG: X = -W A log pi_theta averaged over tokens, to be used with the GPG advantage. Source: GPG (arXiv
    2504.02546).

    When: a baseline without any clip, strictly on-policy.
    """
    return TokenLoss(-inputs.weights * inputs.advantages * inputs.current_logprobs, {})
