"""Scores of rows: the one home of the statistics that rules on sequences compare with a threshold.

A score reduces a deviation d_t of each sampled token to one number of the row. Rules choose the deviation, `score` the
reduction:

| `score` | of d_t | length |
|---|---|---|
| `max` | the largest (in a band: the log-ratio farthest from 0) | long rows have more chances of a large one |
| `mean` | the mean | neutral in expectation; the spread falls as 1 / sqrt(T) |
| `sum` | the sum | grows with length |
| `ln` | sum_t omega_t d_t / sum_t omega_t, omega_t = min(1, sqrt(delta (T - t) / 2)) | as `mean` |
| `ser` | the mean of abs(w_t - 1), whatever d_t is | as `mean` |

`max_t d_t <= c` rejects long rows more and `mean_t d_t <= c` short ones: only a threshold that depends on the length
(`by_length`) is neutral in fact. Rows without sampled tokens score 0. Shape letters: B sequences, T tokens.
Source: Trust Region Masking (arXiv 2512.23075).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal, get_args

from torch import Tensor

from moe_trm.corrections.decision import check_positive
from moe_trm.corrections.evidence import Evidence
from moe_trm.corrections.rows import num_tokens, over_tokens, row_max, row_sum, token_rank
from moe_trm.errors import ConfigError
from moe_trm.methods import summable
from moe_trm.ratios import clamp_log_ratio

Score = Literal["max", "mean", "sum", "ln", "ser"]
Divergence = Literal["sampled", "exact"]
SCORES: tuple[Score, ...] = get_args(Score)
NO_SIGN = "ser averages abs(w - 1), which has no sign: it cannot say on which side of a band of ratios a row lies"
NO_RATIO = "ser averages abs(w - 1) over both directions, and a veto compares ratios with a lowest one"

ESTIMATORS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "k1": lambda x: -x,
        "k2": lambda x: x**2 / 2,
        "k3": lambda x: x.expm1() - x,
        "error": lambda x: x.expm1().abs(),
    }
)
"""Deviations of a token from its log-ratio x; each is 0 where x is, so that places off the mask add nothing."""

_DIVERGENCE = {"max": "k2", "mean": "k3", "sum": "k3", "ln": "error", "ser": "error"}
# k3 would let a ratio of 0.01 pass at a maximum that stops 100; k2 treats both alike.


def divergence_score(
    score: str, evidence: Evidence, log_ratio: Tensor, divergence: str = "sampled", ln_delta: float | None = None
) -> Tensor:
    """Distance of the policies on a row, `[B]`, never negative.

    `sampled`: d = k2 for `max`, k3 for `mean` and `sum`, abs(w - 1) for `ln` and `ser`. `exact`: d = KL(mu || pi) of
    each context for the first three. For the others it is min(2, sqrt(2 KL)), which is at least E_mu abs(w - 1).
    """
    if divergence != "exact":
        values = ESTIMATORS[_DIVERGENCE[score]](clamp_log_ratio(log_ratio))
    elif score in ("max", "mean", "sum"):
        values = exact_kl(evidence)
    else:
        values = (2 * exact_kl(evidence)).sqrt().clamp(max=2.0)  # Pinsker's inequality
    if score == "max" and values.shape[1]:
        return values.amax(dim=1)  # 0 off the mask, which is no more than any of them
    return reduced(values, evidence, score, ln_delta)


def drop_score(
    score: str, evidence: Evidence, log_ratio: Tensor, divergence: str = "sampled", ln_delta: float | None = None
) -> Tensor:
    """Loss of likelihood of a row, `[B]`: d = -log w, or with `exact` its expectation KL(mu || pi)."""
    if score == "ser":
        return divergence_score(score, evidence, log_ratio, divergence)
    values = exact_kl(evidence) if divergence == "exact" else -clamp_log_ratio(log_ratio)
    return reduced(values, evidence, score, ln_delta)


def signed_score(score: str, evidence: Evidence, log_ratio: Tensor, ln_delta: float | None = None) -> Tensor:
    """The log-ratio of a row, `[B]`, with its sign: d = log w, for rules that keep a band of ratios."""
    x = clamp_log_ratio(log_ratio)
    if score != "max":
        return reduced(x, evidence, score, ln_delta)
    highest, lowest = row_max(x, evidence.mask), -row_max(-x, evidence.mask)
    return highest.where(highest.abs() >= lowest.abs(), lowest)


def reduced(values: Tensor, evidence: Evidence, reduction: str, ln_delta: float | None = None) -> Tensor:
    """`values` `[B, T]`, 0 off the mask, as one number of each row, `[B]`; `ser` reduces as `mean`."""
    if reduction == "max":
        return row_max(values, evidence.mask)
    if reduction == "ln":
        assert ln_delta is not None
        return _position_weighted(values, evidence.mask, ln_delta)
    total = values.sum(dim=1)
    return total if reduction == "sum" else total / evidence.ratios.packing.lengths.clamp(min=1)


def check_score(
    rule: str, score: str, ln_delta: float | None, *, impossible: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Refuse a score that the rule cannot use, and an `ln_delta` that is missing or idle.

    `impossible`: scores that the rule cannot use, with the reason.
    """
    where, scores = f"correction {rule}, score", [name for name in SCORES if name not in impossible]
    if score in impossible:
        raise ConfigError(
            f"this score is not possible here: {impossible[score]}", where=where, got=score, expected=", ".join(scores)
        )
    if (score == "ln") != (ln_delta is not None):
        raise ConfigError(
            "score=ln needs ln_delta, the assumed bound of the token KL in nats, which has no published value"
            if score == "ln"
            else "ln_delta is read by score=ln only",
            where=f"correction {rule}, ln_delta",
            got=f"{ln_delta} with score={score}",
            expected="both or neither",
        )
    if ln_delta is not None:
        check_positive(rule, "ln_delta", ln_delta)


def unscored(score: str, evidence: Evidence) -> summable.Summable:
    """`unscored_fraction` of `score=ln`: the share of rows of one token, whose only weight omega_T is 0."""
    if score != "ln":
        return {}
    lengths = evidence.ratios.packing.lengths
    return summable.fraction("unscored_fraction", lengths == 1, lengths > 0)


def exact_kl(evidence: Evidence) -> Tensor:
    """KL(mu || pi_theta) of each sampled context, `[B, T]`, 0 off the mask."""
    if evidence.exact_kl is None:
        raise ConfigError(
            "divergence='exact' needs the exact KL of each context, and the evidence has none",
            where="correction",
            got="exact_kl=None",
            expected="exact_kl of shape [B, T]",
            fix="record the sampling mask with its log-probs (sampling_mask.mode=keep), or use divergence='sampled'",
        )
    return evidence.exact_kl.detach().where(evidence.mask, 0.0)


def _position_weighted(values: Tensor, mask: Tensor, delta: float) -> Tensor:
    remaining = over_tokens(num_tokens(mask), mask) - token_rank(mask)
    omega = (remaining.clamp(min=0).to(values.dtype) * delta / 2).sqrt().clamp(max=1.0)
    total = row_sum(omega, mask)
    return row_sum(omega * values, mask) / total.where(total > 0, total.new_ones(()))
