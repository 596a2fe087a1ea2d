"""OAPL: regress the log-ratio of a row on its advantage under the optimal value."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_trm.corrections.rows import over_tokens, row_sum
from moe_trm.errors import ConfigError
from moe_trm.losses.checks import require
from moe_trm.losses.inputs import LossInputs, TokenLoss
from moe_trm.losses.loss import loss


@loss(aggregation="seq-mean-token-mean", ratio="total", scope="batch", needs=("groups",))
def oapl(inputs: LossInputs, log_ratio: Tensor, *, beta: float = 1.0, beta_value: float = 1.0) -> TokenLoss:
    """OAPL: X_i = W (beta sum_t log w - (R_i - V_g))^2, V_g = beta_value log mean_{j in g} exp(R_j / beta_value).

    A regression towards pi proportional to mu exp(R / beta): no ratio, no clip, and the on-policy gradient is not the
    policy gradient. V_g compares the samples of a prompt, which are planned into one minibatch; beta_value -> infinity
    makes it the mean. How the paper estimates V_g is not certain. Needs rewards and group ids. Source: OAPL.

    When: rollouts may be arbitrarily old, and rewards are dense enough for a regression.
    """
    require(beta > 0 and beta_value > 0, "oapl", "both > 0", beta=beta, beta_value=beta_value)
    if inputs.rewards is None or inputs.group_ids is None:
        raise ConfigError(
            "oapl regresses on rewards within groups",
            where="loss oapl",
            got="no rewards or group ids",
            expected="rewards and group_ids of shape [B]",
        )
    keep = inputs.keep
    value = beta_value * _log_mean_exp(inputs.rewards.to(log_ratio.dtype) / beta_value, inputs.group_ids)
    gap = beta * row_sum(log_ratio, inputs.counted) - (inputs.rewards.to(log_ratio.dtype) - value)
    return TokenLoss(over_tokens(gap**2, keep) * inputs.weights, {})


def _log_mean_exp(values: Tensor, group_ids: Tensor) -> Tensor:
    same = group_ids[:, None] == group_ids[None, :]
    return torch.where(same, values[None, :], -torch.inf).logsumexp(dim=1) - same.sum(dim=1).to(values.dtype).log()
