"""QUATRO: the exact KL-regularised update, stabilised by the log-ratio. Shape letters: B rows, T tokens, G prompts."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_trm.corrections.rows import over_tokens, row_mean
from moe_trm.losses.checks import require
from moe_trm.losses.inputs import LossInputs, TokenLoss, grouped
from moe_trm.losses.loss import loss
from moe_trm.methods import summable
from moe_trm.ratios import clamp_log_ratio

HALVINGS = 100
"""Halvings of the bracket around a multiplier, which is twelve decades wide: this ends far below rounding."""


@loss(aggregation="token-mean", experimental=True)
def quatro(inputs: LossInputs, log_ratio: Tensor, *, multiplier: float = 2.0) -> TokenLoss:
    """QUATRO: X = -W sg[r (A - multiplier log r)] log pi_theta.

    `multiplier` is the dual variable of max E[A] subject to KL <= budget; `quatro_query` solves it for each prompt. The
    published sampled estimator, and whether it is per token or per sequence, are not established.
    Source: QUATRO (arXiv 2602.04620).

    When: the trust region should be soft, and one for all prompts will do. Research.
    """
    require(multiplier >= 0, "quatro", ">= 0", multiplier=multiplier)
    return TokenLoss(_values(inputs, log_ratio, multiplier), {})


@loss(aggregation="token-mean", scope="batch", needs=("groups",), experimental=True)
def quatro_query(inputs: LossInputs, log_ratio: Tensor, *, budget: float = 0.01) -> TokenLoss:
    """QUATRO with a multiplier for each prompt: X = -W sg[r (A - lambda_q log r)] log pi_theta.

    lambda_q is the dual variable of max E_pi[A] subject to KL(pi || pi_old) <= budget over the samples of the prompt:
    KL(softmax(A / lambda_q) || uniform) = budget, about sqrt(Var_q(A) / (2 budget)) for a small budget. A is the row's
    mean advantage, as `advantage.name` made it. Prompts whose advantages are all equal have no update to make, and
    train nothing. A budget (nats) that the best sample alone does not use up leaves lambda_q at 0. `multiplier` is its
    mean over tokens. The published sampled estimator, its level and the budget are not established: the dual is the one
    of the stated problem. Source: QUATRO (arXiv 2602.04620).

    When: the trust region should be the same for every prompt whatever its reward spread. Research. Costs a bisection
    over one number of each row.

    Raises:
        ConfigError: a budget that is not above 0, or rows without the ids of their prompts.
    """
    require(budget > 0, "quatro_query", "> 0", budget=budget)
    advantages = row_mean(inputs.advantages, inputs.counted)
    multiplier, has_spread = optimal_multipliers(
        advantages, grouped(inputs, "quatro_query"), inputs.counted.any(dim=1), budget=budget
    )
    over = over_tokens(multiplier.to(log_ratio.dtype), inputs.keep)
    values = torch.where(over_tokens(has_spread, inputs.keep), _values(inputs, log_ratio, over), 0.0)
    return TokenLoss(values, summable.mean("multiplier", over, inputs.keep & over_tokens(has_spread, inputs.keep)))


def _values(inputs: LossInputs, log_ratio: Tensor, multiplier: float | Tensor) -> Tensor:
    x = clamp_log_ratio(log_ratio.detach())
    return -inputs.weights * x.exp() * (inputs.advantages - multiplier * x) * inputs.current_logprobs


def optimal_multipliers(
    advantages: Tensor, group_ids: Tensor, judged: Tensor, *, budget: float
) -> tuple[Tensor, Tensor]:
    """lambda_q of each row's prompt `[B]` float64, and whether the advantages of the prompt differ, `[B]` bool.

    Only rows of `judged` `[B]` take part. 0 where advantages are equal, and where the budget is never used up.
    """
    if not len(advantages):
        return advantages.double(), judged
    index, place = _places(group_ids)
    # One row for each prompt: plain reductions add in the same order everywhere, scattered ones need not.
    shape = int(index.max()) + 1, int(place.max()) + 1
    values = torch.full(shape, torch.nan, dtype=torch.float64, device=index.device)
    values[index, place] = torch.where(judged, advantages.double(), torch.nan)
    finite = values.isfinite()
    count = finite.sum(dim=1).double()
    top = torch.where(finite, values, -torch.inf).amax(dim=1)
    bottom = torch.where(finite, values, torch.inf).amin(dim=1)
    below = torch.where(finite, values - top[:, None], -torch.inf)

    def divergence(multiplier_G: Tensor) -> Tensor:
        """KL(softmax(A / lambda) || uniform) of each prompt, `[G]`."""
        scaled = below / multiplier_G[:, None]
        weights = scaled.exp()
        total = weights.sum(dim=1)
        return torch.where(weights > 0, weights * scaled, 0.0).sum(dim=1) / total - total.log() + count.log()

    spread = torch.where(count > 0, top - bottom, 0.0)
    has_spread = spread > 0
    low, high = 1e-6 * spread.clamp(min=1e-300), 1e6 * spread.clamp(min=1e-300)
    used_up = has_spread & (divergence(low) > budget)
    for _ in range(HALVINGS):
        middle = (low * high).sqrt()
        beyond = divergence(middle) > budget
        low, high = torch.where(beyond, middle, low), torch.where(beyond, high, middle)
    return torch.where(used_up, low, 0.0)[index], has_spread[index] & judged


def _places(group_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Number of each row's prompt, and its place among the rows of the prompt, both `[B]` int64."""
    order = group_ids.argsort(stable=True)
    ascending = group_ids[order]
    begins = torch.ones_like(ascending, dtype=torch.bool)
    begins[1:] = ascending[1:] != ascending[:-1]
    number = begins.cumsum(0) - 1
    index, place = torch.empty_like(order), torch.empty_like(order)
    index[order] = number
    place[order] = torch.arange(len(order), device=order.device) - begins.nonzero()[:, 0][number]
    return index, place
