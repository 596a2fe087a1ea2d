"""DISPO: separate weight bounds for correct and incorrect answers."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from moe_trm.losses.checks import require
from moe_trm.losses.inputs import LossInputs, TokenLoss
from moe_trm.losses.loss import loss
from moe_trm.methods import summable
from moe_trm.ratios import clamp_log_ratio


@loss(aggregation="token-mean", experimental=True)
def dispo(
    inputs: LossInputs,
    log_ratio: Tensor,
    *,
    correct_low: float = 1.0,
    correct_high: float = 4.0,
    incorrect_low: float = 0.5,
    incorrect_high: float = 1.0,
    regimes: Literal["ratio", "advantage"] = "ratio",
) -> TokenLoss:
    """DISPO: X = -W sg[clip(r, 1 - low_c, 1 + high_c)] A log pi_theta, bounds by correctness c of the row.

    Correct means reward above 0 where rewards are known, else A > 0. The four regimes are correctness by the side of 1
    that r is on, as the abstract has them. `regimes="advantage"`: by the sign of A, as reviews have them; r is bounded
    above alone where A > 0, and below alone where A < 0. The two differ on tokens whose r is on the side that
    A does not push to. The four published values are not established; the defaults are ours. Too tight an upper bound
    on incorrect answers invites repetition, too tight a lower one vanishing length. Source: DISPO.

    When: right and wrong answers should be trusted to different degrees; its four bounds need a search.
    """
    got = {
        "correct_low": correct_low,
        "correct_high": correct_high,
        "incorrect_low": incorrect_low,
        "incorrect_high": incorrect_high,
    }
    require(min(got.values()) >= 0, "dispo", "all >= 0", **got)
    correct = (
        inputs.advantages > 0 if inputs.rewards is None else (inputs.rewards > 0)[:, None].expand(inputs.keep.shape)
    )
    ratio = clamp_log_ratio(log_ratio.detach()).exp()
    new = log_ratio.new_tensor
    low = torch.where(correct, new(1 - correct_low), new(1 - incorrect_low))
    high = torch.where(correct, new(1 + correct_high), new(1 + incorrect_high))
    if regimes == "advantage":
        low = torch.where(inputs.advantages < 0, low, -torch.inf)
        high = torch.where(inputs.advantages > 0, high, torch.inf)
    bounded = torch.minimum(torch.maximum(ratio, low), high)
    values = -inputs.weights * bounded * inputs.advantages * inputs.current_logprobs
    return TokenLoss(values, summable.fraction("pg_clipfrac", bounded != ratio, inputs.keep))
