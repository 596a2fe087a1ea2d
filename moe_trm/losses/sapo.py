"""Soft adaptive policy optimisation: a sigmoid gate instead of a clip."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_trm.losses.checks import require
from moe_trm.losses.inputs import LossInputs, TokenLoss
from moe_trm.losses.loss import loss
from moe_trm.ratios import clamp_log_ratio


@loss(aggregation="seq-mean-token-mean")
def sapo(inputs: LossInputs, log_ratio: Tensor, *, tau_positive: float = 1.0, tau_negative: float = 1.05) -> TokenLoss:
    """SAPO: X = -W A h(r), h(r) = (4 / tau) sigmoid(tau (r - 1)), tau = tau_positive where A > 0, else tau_negative.

    h'(1) = 1, so the on-policy gradient is PPO's; it fades smoothly as r leaves 1. Source: SAPO (arXiv 2511.20347).

    When: a clip's edge makes training jumpy; a smooth gate at about the same width.
    """
    require(
        tau_positive > 0 and tau_negative > 0, "sapo", "both > 0", tau_positive=tau_positive, tau_negative=tau_negative
    )
    new = log_ratio.new_tensor
    tau = torch.where(inputs.advantages > 0, new(tau_positive), new(tau_negative))
    gate = 4 / tau * torch.sigmoid(tau * (clamp_log_ratio(log_ratio).exp() - 1))
    return TokenLoss(-inputs.weights * inputs.advantages * gate, {})
