"""Forms of a rule's decision: a weight for each token, or which tokens or rows stay. Shape letters: B sequences, T
tokens.

A weight that is not finite cannot be trusted: its token is dropped, and weights are 0 wherever a token is dropped, so
no `inf * 0` can arise later.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from moe_trm.corrections.evidence import Correction, RowDecision
from moe_trm.errors import ConfigError
from moe_trm.methods import summable

Threshold = float | Tensor
"""One number, or one for each row, `[B]`, where it depends on the length (`by_length`)."""


def weigh(
    weights: Tensor, mask: Tensor, keep: Tensor | None = None, metrics: Mapping[str, Tensor] | None = None
) -> Correction:
    """Multiply tokens by `weights` `[B, T]`; drop those outside `keep` `[B, T]`."""
    kept = mask & weights.isfinite() if keep is None else mask & keep & weights.isfinite()
    return Correction(weights=torch.where(kept, weights.detach(), 0.0), keep=kept, metrics=metrics or {})


def keep_tokens(keep: Tensor, mask: Tensor, score: Tensor) -> Correction:
    """Drop the tokens where `keep` `[B, T]` is False. `score` `[B, T]` is the statistic the rule thresholds."""
    decision = weigh(torch.ones_like(score), mask, keep, summable.mean("score", score, mask))
    return replace(decision, score=score)


def keep_rows(keep: Tensor, score: Tensor) -> RowDecision:
    """Drop the rows where `keep` `[B]` is False. `score` `[B]` is the statistic the rule thresholds."""
    return RowDecision(keep, None, {}, score)


def weigh_rows(weights: Tensor, keep: Tensor | None = None) -> RowDecision:
    """Multiply rows by `weights` `[B]`; drop those outside `keep` `[B]`."""
    kept = weights.isfinite() if keep is None else keep & weights.isfinite()
    return RowDecision(kept, torch.where(kept, weights.detach(), 0.0), {})


def check_band(rule: str, low: Threshold, high: Threshold) -> None:
    """Refuse a band of ratios that keeps nothing or is not one of ratios: `0 <= low <= high`, `high > 0`."""
    if isinstance(low, Tensor) or isinstance(high, Tensor):
        return  # made by calibration
    if not (0 <= low <= high and high > 0):
        raise ConfigError(
            "not a band of ratios",
            where=f"correction {rule}",
            got=f"low={low}, high={high}",
            expected="0 <= low <= high, high > 0",
        )


def check_positive(rule: str, name: str, value: Threshold) -> None:
    """Refuse a threshold that is not above 0. One for each row is made by calibration."""
    if not isinstance(value, Tensor) and not value > 0:
        raise ConfigError("threshold must be above 0", where=f"correction {rule}, {name}", got=value, expected="> 0")


def exponential(value: Threshold) -> Threshold:
    """e^value."""
    return value.exp() if isinstance(value, Tensor) else math.exp(value)


def logarithm(value: Threshold) -> Threshold:
    """log(value), which must be above 0 unless it is a tensor."""
    return value.log() if isinstance(value, Tensor) else math.log(value)
