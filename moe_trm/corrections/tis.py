"""Truncated importance sampling: weight tokens by how much likelier the learner finds them, up to a cap."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from moe_trm.corrections.decision import check_band, weigh, weigh_rows
from moe_trm.corrections.evidence import Correction, Evidence, RowDecision
from moe_trm.corrections.rule import rule
from moe_trm.errors import ConfigError
from moe_trm.methods import summable
from moe_trm.ratios import clamp_log_ratio


@rule(
    ratio="engine",
    scope="token",
    calibrate=lambda quantile: {"cap": math.exp(quantile)},
    weighs=True,
    rejects=False,
)
def token_tis(
    evidence: Evidence,
    log_ratio: Tensor,
    *,
    cap: float = 2.0,
    floor: float = 0.0,
    tokens: Literal["all", "post_tool"] = "all",
) -> Correction:
    """Token-level truncated importance sampling: w_t = clip(rho_t, floor, cap).

    rho_t is the ratio read (default: engine). Keeps every token; biased by truncation, low variance. Neutral to length.
    `cap` 1.5-5 is usual, 2 the field's default. A `target_reject_rate` chooses the cap that truncates this share.
    Reports `truncated_fraction` and `raised_fraction`, the shares of tokens above the cap and below the floor.

    `tokens="post_tool"` weighs only the turns after the first, whose context has a tool's output or other appended
    text; all other tokens keep weight 1. Shares and target are then of those tokens. There engines differ most.
    Source: truncated importance sampling as in verl, slime and AReaL; on tokens after tools: in use, unpublished.

    When: the engines agree up to small noise and a gradient with little bias matters more than a guarantee; the first
    correction to try.
    """
    check_band("token_tis", floor, cap)
    clamped = clamp_log_ratio(log_ratio)
    ratio = clamped.exp()
    weighed = evidence.mask if tokens == "all" else evidence.mask & _after_tools(evidence)
    # Not 1 itself: a ratio that is NaN must not pass with a weight.
    weights = torch.where(weighed, ratio.clamp(floor, cap), ratio * 0 + 1)
    decision = weigh(weights, evidence.mask, metrics=_bounded(ratio, floor, cap, weighed))
    return replace(decision, score=clamped, judged=weighed)


def _after_tools(evidence: Evidence) -> Tensor:
    """`[B, T]` bool, tokens of the turns after the first."""
    if evidence.turn_ids is None:
        raise ConfigError(
            "it is unknown which tokens come after a tool",
            where="correction token_tis, tokens",
            got="post_tool without turn ids",
            expected="the turn of every token",
            fix="leave tokens out",
        )
    return evidence.turn_ids > 0


@rule(
    ratio="engine",
    scope="sequence",
    calibrate=lambda quantile: {"cap": math.exp(quantile)},
    weighs=True,
    rejects=False,
)
def seq_tis(evidence: Evidence, log_ratio: Tensor, *, cap: float = 2.0, floor: float = 0.0) -> RowDecision:
    """Sequence-level truncated importance sampling: w_i = clip(exp(sum_t log rho_t), floor, cap) on every token of row
    i.

    Unbiased below the cap, but the product leaves 1 exponentially with length: expect it to saturate on long rows.
    The sum, not its terms, is clamped to +-20 nats. A `target_reject_rate` chooses the cap that truncates this share of
    rows. `floor` above 0 is slime's `clip` mode, whose floor is 1 / cap unless given; verl has none. Reports
    `truncated_fraction` and `raised_fraction` of rows.
    Source: truncated importance sampling as in verl, slime and AReaL.

    When: answers are short (some hundred tokens) and the gradient should belong to whole answers; on long ones see
    `score` and prefer `token_tis`.
    """
    check_band("seq_tis", floor, cap)
    total = clamp_log_ratio(log_ratio.sum(dim=1))
    ratio = total.exp()
    metrics = _bounded(ratio, floor, cap, evidence.mask.any(dim=1))
    return replace(weigh_rows(ratio.clamp(floor, cap)), score=total, metrics=metrics)


def _bounded(ratio: Tensor, floor: float, cap: float, judged: Tensor) -> summable.Summable:
    """Shares of `judged` whose ratio the bounds changed."""
    return summable.fractions({"truncated_fraction": ratio > cap, "raised_fraction": ratio < floor}, judged)
