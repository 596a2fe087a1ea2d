"""Thresholds from a target: the rate at which a rule would have rejected over a window in which nothing was corrected."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from moe_trm.corrections.evidence import Evidence
from moe_trm.corrections.rule import BoundRule, RegisteredRule
from moe_trm.errors import ConfigError


def scores(rule: RegisteredRule, evidence: Evidence, **fixed: float | str) -> Tensor:
    """The statistic of `rule` for each unit it would judge, tokens or rows, `[units]`: rejected iff above the threshold.

    `fixed` are thresholds that are not calibrated, such as `delta` of LN-TRM or `divergence`.
    """
    correction = rule.bind(**{**_calibrated(rule, 1.0), **fixed})(evidence)
    assert correction.score is not None
    judged = evidence.mask if correction.score.dim() == 2 else evidence.mask.any(dim=1)
    if correction.judged is not None:
        judged = judged & correction.judged
    return correction.score[judged].detach()


def calibrate(
    rule: RegisteredRule, window: Iterable[Tensor], target_reject_rate: float, **fixed: float | str
) -> BoundRule:
    """`rule` with the threshold that would have rejected `target_reject_rate` of the units in `window` (a list of `scores`).

    The threshold is the empirical quantile 1 - rate, a score that occurred, so at most that share was above it. Freeze, log
    and save it: one that follows the batch would hide a growing mismatch behind a constant reject rate. Symmetric bands and
    floors take the quantile of the absolute or negated log-ratio.

    Raises:
        ConfigError: a rate outside (0, 1), a rule without a score, an empty window.
    """
    if not 0 < target_reject_rate < 1:
        raise ConfigError(
            "not a reject rate",
            where=f"correction {rule.name}, target_reject_rate",
            got=target_reject_rate,
            expected="between 0 and 1",
        )
    collected = torch.cat(list(window)).double() if (window := list(window)) else torch.zeros(0)
    if not len(collected):
        raise ConfigError(
            "no scores to calibrate on",
            where=f"correction {rule.name}",
            got="an empty window",
            expected="at least one batch",
        )
    quantile = torch.quantile(collected.nan_to_num(nan=torch.inf), 1 - target_reject_rate, interpolation="higher")
    return rule.bind(**{**_calibrated(rule, max(float(quantile), 1e-12)), **fixed})


def _calibrated(rule: RegisteredRule, quantile: float) -> dict[str, float]:
    if rule.calibrate is None:
        raise ConfigError(
            "this rule cannot be calibrated",
            where=f"correction {rule.name}",
            got="target_reject_rate",
            expected="a rule that thresholds one score",
        )
    return dict(rule.calibrate(quantile))
