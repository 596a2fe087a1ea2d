"""Aggregation of token losses into one number.

Shape letters: B sequences, T tokens; N sequences and M tokens of the global minibatch.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from moe_trm.errors import ConfigError

Aggregation = Literal["token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]


def aggregate(
    values: Tensor,
    keep: Tensor,
    mask: Tensor,
    mode: str,
    *,
    num_sequences: int,
    num_tokens: int,
    horizon: int | None = None,
    sample_tokens: Tensor | None = None,
) -> Tensor:
    """This micro-batch's share of the loss: the plain sum of shares over micro-batches and ranks is the loss of the
    minibatch.

    | mode | loss | known as |
    |---|---|---|
    | `token-mean` | sum(X keep) / M | DAPO, BNPO |
    | `token-sum` | sum(X keep) | |
    | `seq-mean-token-mean` | sum_i (sum_t X keep / T_i) / N | GRPO |
    | `seq-mean-token-sum` | sum_i sum_t X keep / N | TRM, REINFORCE |
    | `seq-mean-token-sum-norm` | sum_i sum_t X keep / (N H) | Dr.GRPO |

    N, M and T_i count sampled tokens before any correction: what is rejected contributes nothing and makes nothing else
    weigh more. A sequence i is a sample: N counts samples, and T_i counts all rows of the sample.
    Source: GRPO (arXiv 2402.03300), DAPO (2503.14476), Dr.GRPO (2503.20783).

    Args:
        values: `[B, T]` token losses; where `keep` is False they may be anything.
        keep: `[B, T]` bool, tokens that train.
        mask: `[B, T]` bool, sampled tokens.
        mode: one of the above.
        num_sequences: N of the global minibatch.
        num_tokens: M of the global minibatch.
        horizon: H of `seq-mean-token-sum-norm`, a constant such as the longest response allowed.
        sample_tokens: `[B]` T_i where rows are parts of samples; None: every row is a whole sample.

    Raises:
        ConfigError: an unknown mode, or no `horizon` where it is needed.
    """
    row_sums = torch.where(keep & mask, values, 0.0).sum(dim=1)
    if mode == "token-mean":
        return row_sums.sum() / max(num_tokens, 1)
    if mode == "token-sum":
        return row_sums.sum()
    if mode == "seq-mean-token-mean":
        lengths = mask.sum(dim=1) if sample_tokens is None else sample_tokens.to(row_sums.device)
        return (row_sums / lengths.clamp(min=1)).sum() / max(num_sequences, 1)
    if mode == "seq-mean-token-sum":
        return row_sums.sum() / max(num_sequences, 1)
    if mode == "seq-mean-token-sum-norm":
        if horizon is None or horizon <= 0:
            raise ConfigError(
                "seq-mean-token-sum-norm needs a constant horizon",
                where="loss.aggregation",
                got=horizon,
                expected="a positive number of tokens",
                fix="use the longest response allowed, rollout.max_new_tokens",
            )
        return row_sums.sum() / (max(num_sequences, 1) * horizon)
    raise ConfigError(
        "unknown aggregation", where="loss.aggregation", got=mode, expected=", ".join(get_args(Aggregation))
    )
