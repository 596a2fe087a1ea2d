"""Plain policy gradient, under the correction weights or none."""

from __future__ import annotations

from torch import Tensor

from moe_trm.losses.inputs import LossInputs, TokenLoss
from moe_trm.losses.objective import objective


@objective(aggregation="seq-mean-token-sum", ratio="total")
def reinforce(inputs: LossInputs, log_ratio: Tensor) -> TokenLoss:
    """REINFORCE: X = -W A log pi_theta, with W the correction weights, detached.

    No ratio of its own and no clip: with importance weights on the total ratio it is the bypass objective. The gradient
    coefficient is W A. Source: methods.md 5.3, 5.7.
    """
    return TokenLoss(-inputs.weights * inputs.advantages * inputs.current_logprobs, {})


@objective(aggregation="token-mean", ratio="total")
def gpg(inputs: LossInputs, log_ratio: Tensor) -> TokenLoss:
    """GPG: X = -W A log pi_theta averaged over tokens, to be used with the GPG advantage. Source: methods.md 5.7."""
    return TokenLoss(-inputs.weights * inputs.advantages * inputs.current_logprobs, {})
