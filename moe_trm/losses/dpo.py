"""Online DPO: preferences between the samples of a prompt, over the log-ratio to the reference."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import softplus

from moe_trm.corrections.rows import over_tokens, row_sum
from moe_trm.errors import ConfigError
from moe_trm.losses.checks import require
from moe_trm.losses.inputs import LossInputs, TokenLoss
from moe_trm.losses.loss import loss


@loss(aggregation="seq-mean-token-mean", ratio="total", scope="batch", needs=("groups", "reference"), holds="none")
def dpo(inputs: LossInputs, log_ratio: Tensor, *, beta: float = 0.1) -> TokenLoss:
    """Online DPO: the mean of -log sigmoid(beta (s_i - s_j)) over the pairs of a prompt with R_i > R_j, s_i = sum_t
    log pi_theta / pi_ref.

    With P pairs among the G samples of a prompt, X_i = W G / (2 P) times the sum over the pairs that i is in, so that
    the mean over rows is that over pairs. Its gradient covers all pairs, though each row is differentiated in its
    own micro-batch alone. Two samples of a prompt make the published pair. A prompt with equal rewards has no pair and
    no gradient. The reference is scored though `kl.coef` is 0, and `kl.teacher` may be it. Needs rewards, group ids
    and the reference's log-probs. Source: online DPO as in Asynchronous RLHF (arXiv 2410.18252).

    When: rewards say no more than which answer is better, or samples are old.
    """
    require(beta > 0, "dpo", "beta > 0", beta=beta)
    if inputs.rewards is None or inputs.group_ids is None or inputs.reference_logprobs is None:
        raise ConfigError(
            "dpo compares the samples of a prompt under policy and reference",
            where="loss dpo",
            got="no rewards, group ids or log-probs of the reference",
            expected="rewards and group_ids of shape [B], reference_logprobs of shape [B, T]",
        )
    reference = torch.where(inputs.counted, inputs.reference_logprobs, 0.0)
    current = inputs.log_ratio("total", by_row=True) + inputs.ratios.rollout_logprobs
    score = row_sum(current - reference, inputs.counted)
    better = (inputs.group_ids[:, None] == inputs.group_ids) & (inputs.rewards[:, None] > inputs.rewards)
    sign = better.to(score.dtype) - better.T.to(score.dtype)
    same = (inputs.group_ids[:, None] == inputs.group_ids).to(score.dtype)
    size, pairs = same.sum(dim=1), (same @ better.to(score.dtype).sum(dim=1)).clamp(min=1)
    lost = sign.abs() * softplus(-beta * sign * (score[:, None] - score.detach()))
    row_loss = size / pairs * lost.sum(dim=1)
    # Half of the value and all of the gradient: the other row of a pair is a constant here.
    return TokenLoss(over_tokens(row_loss - row_loss.detach() / 2, inputs.keep) * inputs.weights, {})
