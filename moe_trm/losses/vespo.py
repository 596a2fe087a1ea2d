"""VESPO: a variational weight of the sequence ratio."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moe_trm.corrections.rows import over_tokens, row_sum
from moe_trm.losses.checks import require
from moe_trm.losses.inputs import LossInputs, TokenLoss
from moe_trm.losses.loss import loss
from moe_trm.methods import summable


@loss(aggregation="token-mean", ratio="total", scope="sequence")
def vespo(
    inputs: LossInputs,
    log_ratio: Tensor,
    *,
    k_positive: float = 2.0,
    lambda_positive: float = 3.0,
    k_negative: float = 3.0,
    lambda_negative: float = 2.0,
) -> TokenLoss:
    """VESPO: X = -sg[phi(W_i)] A log pi_theta, phi(W) = exp(lambda + k log W - lambda W), W_i = exp(sum_t log w).

    phi(1) = 1; its maximum is at k / lambda. (k, lambda) depend on the sign of the row's mean advantage. log W is
    clamped to [log 1e-8, 20]; a phi that is not finite becomes 0, lambda is at least 1e-4. Correction weights enter
    through their product over the row, inside log W, and are not multiplied again. Source: VESPO, as in its released
    code.

    When: rollouts are stale and sequence weights explode; its smooth weight replaces a clip and a cap.
    """
    require(min(k_positive, k_negative) > 0, "vespo", "k > 0", k_positive=k_positive, k_negative=k_negative)
    keep = inputs.keep
    log_weight = torch.where(keep, inputs.weights, 1.0).log()
    log_product = (row_sum(log_ratio.detach(), inputs.counted) + row_sum(log_weight, keep)).clamp(math.log(1e-8), 20.0)
    positive = row_sum(inputs.advantages, inputs.counted) >= 0
    new = log_ratio.new_tensor
    k = torch.where(positive, new(k_positive), new(k_negative))
    strength = torch.where(positive, new(lambda_positive), new(lambda_negative)).clamp(min=1e-4)
    phi = (strength + k * log_product - strength * log_product.exp()).exp().nan_to_num(nan=0.0, posinf=0.0)
    metrics = summable.mean("vespo_phi", phi, keep.any(dim=1))
    return TokenLoss(-over_tokens(phi, keep) * inputs.advantages * inputs.current_logprobs, metrics)
