"""The eleven rejection modes that other frameworks call `token_k1` ... `seq_max_k3`.

Each mode is an estimator of the divergence, k1 = -log rho, k2 = (log rho)^2 / 2, k3 = rho - 1 - log rho, taken per
token or as the sum, mean or maximum of a row. Every mode looks at all sampled tokens, never at a mask that another mode
has thinned. Shape letters: B sequences, T tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from torch import Tensor

from moe_trm.corrections.decision import (
    check_band,
    check_positive,
    exponential,
    keep_rows,
    keep_tokens,
    logarithm,
)
from moe_trm.corrections.evidence import Correction, Evidence, RowDecision
from moe_trm.corrections.row_scores import ESTIMATORS, reduced
from moe_trm.corrections.rule import RegisteredRule, Scope, rule
from moe_trm.ratios import clamp_log_ratio


def _band(level: str) -> RegisteredRule:
    def function(
        evidence: Evidence,
        log_ratio: Tensor,
        *,
        low: float,
        high: float,
        orientation: Literal["verl", "ratio"] = "verl",
    ) -> Correction | RowDecision:
        check_band(f"{level}_k1", low, high)
        check_positive(f"{level}_k1", "low", low)
        k1 = _statistic_of(level, "k1", log_ratio, evidence)
        tested = k1 if orientation == "verl" else -k1
        keep = (tested >= logarithm(low)) & (tested <= logarithm(high))
        decision = keep_tokens(keep, evidence.mask, k1) if level == "token" else keep_rows(keep, k1)
        return replace(decision, statistics=k1.abs())

    function.__name__ = f"{level}_k1"
    function.__doc__ = f"""{_subject(level)} iff log low <= s <= log high, s = {_statistic(level)} of k1 = -log rho.

    With `orientation="verl"` (the field's) s is -log rho, so what stays has rho in [1/high, 1/low]: a mirrored band
    unless low = 1/high. `orientation="ratio"` tests log rho itself. No default thresholds; a `target_reject_rate`
    chooses a band with low = 1/high.{_bias(level)} Source: rejection modes of verl's rollout correction.

    When: {_when(level, "k1")}
    """
    return rule(
        ratio="engine",
        scope=_scope(level),
        calibrate=lambda quantile: {"low": exponential(-quantile), "high": exponential(quantile)},
    )(function)


def _upper(level: str, estimator: str) -> RegisteredRule:
    def function(evidence: Evidence, log_ratio: Tensor, *, upper: float) -> Correction | RowDecision:
        check_positive(f"{level}_{estimator}", "upper", upper)
        score = _statistic_of(level, estimator, log_ratio, evidence)
        keep = score <= upper
        return keep_tokens(keep, evidence.mask, score) if level == "token" else keep_rows(keep, score)

    formula = {"k2": "(log rho)^2 / 2", "k3": "rho - 1 - log rho"}[estimator]
    function.__name__ = f"{level}_{estimator}"
    function.__doc__ = f"""{_subject(level)} iff {_statistic(level)} of {estimator} = {formula} is at most `upper` nats.

    No default threshold.{_bias(level)} Source: rejection modes of verl's rollout correction.

    When: {_when(level, estimator)}
    """
    return rule(ratio="engine", scope=_scope(level), calibrate=lambda quantile: {"upper": quantile})(function)


def _statistic_of(level: str, estimator: str, log_ratio: Tensor, evidence: Evidence) -> Tensor:
    values = ESTIMATORS[estimator](clamp_log_ratio(log_ratio))
    return values if level == "token" else reduced(values, evidence, level.removeprefix("seq_"))


def _subject(level: str) -> str:
    return "Keep a token" if level == "token" else "Keep a row"


def _statistic(level: str) -> str:
    return "the value" if level == "token" else f"the {level.removeprefix('seq_')} over its tokens"


def _scope(level: str) -> Scope:
    return "token" if level == "token" else "sequence"


def _when(level: str, estimator: str) -> str:
    """The cases for which a mode is right, as its docstring says."""
    unit = {
        "token": "isolated tokens are off and the rest of their rows should train",
        "seq_sum": "all answers are short or of one length: rows are judged by their total",
        "seq_mean": "rows as a whole drifted, whatever their length",
        "seq_max": "one bad token should cost the row",
    }[level]
    kind = {
        "k1": "the direction matters and errors in both directions may cancel",
        "k2": "both directions count alike",
        "k3": "ratios above 1 are the worse ones",
    }[estimator]
    return f"{unit}; {kind}."


def _bias(level: str) -> str:
    return " Sums grow with length, so long rows are rejected more often." if level == "seq_sum" else ""


token_k1, seq_sum_k1, seq_mean_k1 = _band("token"), _band("seq_sum"), _band("seq_mean")
token_k2, token_k3 = _upper("token", "k2"), _upper("token", "k3")
seq_sum_k2, seq_sum_k3 = _upper("seq_sum", "k2"), _upper("seq_sum", "k3")
seq_mean_k2, seq_mean_k3 = _upper("seq_mean", "k2"), _upper("seq_mean", "k3")
seq_max_k2, seq_max_k3 = _upper("seq_max", "k2"), _upper("seq_max", "k3")
