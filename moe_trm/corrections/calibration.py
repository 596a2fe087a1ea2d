"""Thresholds from a target: the rate at which a rule would have rejected over a window without correction."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from moe_trm.corrections.evidence import Evidence
from moe_trm.corrections.quantile import common_quantile
from moe_trm.corrections.rule import BoundRule, RegisteredRule
from moe_trm.corrections.turns import Turns
from moe_trm.errors import ConfigError


def scores(rule: RegisteredRule, evidence: Evidence, **fixed: float | str) -> Tensor:
    """The statistic of `rule` for each unit it would judge, tokens or rows: rejected (or truncated) iff above the
    threshold.

    `[units]`, or `[units, D]` for a rule with D thresholds. `fixed` are thresholds that are not calibrated, such as
    `delta` of LN-TRM or `divergence`.
    """
    return _measured(rule, evidence, fixed)[0]


def scores_and_lengths(rule: RegisteredRule, evidence: Evidence, **fixed: float | str) -> tuple[Tensor, Tensor]:
    """`scores` of a rule on rows as `[N, D]`, and the sampled tokens of each of these rows, `[N]` int64.

    Raises:
        ConfigError: a rule that rejects no rows by a threshold.
    """
    check_by_length(rule)
    statistics, lengths = _measured(rule, evidence, fixed)
    return statistics.reshape(-1, rule.num_statistics), lengths


def check_by_length(rule: RegisteredRule) -> None:
    """Refuse a rule whose threshold cannot depend on the length of a row, with the reason."""
    where = f"correction {rule.name}, by_length"
    _check_calibrated(rule)
    if rule.scope != "sequence":
        raise ConfigError(
            "this rule judges single tokens, which have no length", where=where, got=True, expected="a rule on rows"
        )
    if not rule.rejects:
        raise ConfigError(
            "this rule rejects no rows: a threshold by length would let long rows weigh more",
            where=where,
            got=True,
            expected="a rule that rejects rows",
        )


def calibrate(
    rule: RegisteredRule, window: Iterable[Tensor], target_reject_rate: float, **fixed: float | str
) -> BoundRule:
    """`rule` with the threshold that would have rejected `target_reject_rate` of the units in `window` (a list of
    `scores`).

    The threshold is the empirical quantile 1 - rate, a score that occurred, so at most that share was above it. Freeze,
    log and save it: one that follows the batch would hide a growing mismatch behind a constant reject rate. Symmetric
    bands and floors take the quantile of the absolute or negated log-ratio, caps the share that would have been
    truncated. Several thresholds are put at one common quantile of their statistics, the one at which together they
    reject the target.

    Raises:
        ConfigError: a rate outside (0, 1), a rule that cannot be calibrated, an empty window.
    """
    if not 0 < target_reject_rate < 1:
        raise ConfigError(
            "not a reject rate",
            where=f"correction {rule.name}, target_reject_rate",
            got=target_reject_rate,
            expected="between 0 and 1",
        )
    _check_calibrated(rule)
    collected = torch.cat(list(window)).double() if (window := list(window)) else torch.zeros(0)
    if not len(collected):
        raise ConfigError(
            "no scores to calibrate on",
            where=f"correction {rule.name}",
            got="an empty window",
            expected="at least one batch",
        )
    statistics = collected.nan_to_num(nan=torch.inf).reshape(-1, rule.num_statistics)
    quantiles = common_quantile(statistics, target_reject_rate)
    return _at(rule, [max(value, 1e-12) for value in quantiles.tolist()], fixed)


def _measured(rule: RegisteredRule, evidence: Evidence, fixed: Mapping[str, float | str]) -> tuple[Tensor, Tensor]:
    """The statistics of the units that the threshold of `rule` can reject, and the tokens of those that are rows or
    turns.
    """
    bound = _at(rule, [1.0] * rule.num_statistics, fixed)
    evidence = Turns(evidence).evidence if bound.by_turn else evidence
    correction = bound.judge(evidence)
    statistics = correction.score if correction.statistics is None else correction.statistics
    assert statistics is not None
    judged = evidence.mask if rule.scope == "token" else evidence.mask.any(dim=1)
    if correction.judged is not None:
        judged = judged & correction.judged
    lengths = evidence.ratios.packing.lengths
    return statistics[judged].detach(), lengths if rule.scope == "token" else lengths[judged]


def _at(rule: RegisteredRule, quantiles: Sequence[float], fixed: Mapping[str, float | str]) -> BoundRule:
    _check_calibrated(rule)
    assert rule.calibrate is not None
    return rule.bind(**{**rule.calibrate(*quantiles), **fixed})


def _check_calibrated(rule: RegisteredRule) -> None:
    if rule.calibrate is None:
        raise ConfigError(
            "this rule cannot be calibrated",
            where=f"correction {rule.name}",
            got="target_reject_rate",
            expected="a rule that thresholds statistics of single tokens or rows",
        )
