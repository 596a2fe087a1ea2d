"""Several rules as one: weights multiply, keep masks are joined by AND, every rule and the whole are reported."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce

import torch
from torch import Tensor

from moe_trm.corrections.evidence import Correction, Evidence, RowDecision
from moe_trm.corrections.rule import BoundRule, kept_fractions
from moe_trm.errors import ConfigError
from moe_trm.methods import summable


def compose(rules: Sequence[BoundRule], *, whole_minibatch: bool = False) -> Callable[[Evidence], Correction]:
    """One correction that applies `rules`, each to the original evidence: no rule sees a mask thinned by another.

    weights = prod_k weights_k,  keep = mask and keep_1 and keep_2 ...

    A rule may be there several times, on another ratio each (`labelled`). Without rules every sampled token is kept
    with weight 1. Metrics: `correction/<rule>/...` of each rule and `correction/kept_fraction`,
    `correction/kept_sequence_fraction` and `correction/weight_{mean,std,eff_sample_size}` (0 for what was dropped) of
    all together, in summable form.

    Raises:
        ConfigError: a rule named twice on one ratio, or one of batch scope unless `whole_minibatch` says that evidence
            is of all micro-batches and ranks together.
    """
    rules = labelled(rules)
    for bound in rules:
        if bound.rule.scope == "batch" and not whole_minibatch:
            raise ConfigError(
                f"{bound.rule.name} judges the whole minibatch and cannot run on one micro-batch",
                where="correction.rules",
                got=bound.rule.name,
                expected="a rule of token or sequence scope",
                fix="use trm_max or opsm, or compute the correction before micro-batching",
            )

    def joint(evidence: Evidence) -> Correction:
        mask, dtype = evidence.mask, evidence.ratios.dtype
        decisions = [bound.decide(evidence) for bound in rules]
        metrics = {key: value for decision in decisions for key, value in decision.metrics.items()}
        rows = _of_rows([decision for decision in decisions if isinstance(decision, RowDecision)], mask)
        tokens = [decision for decision in decisions if not isinstance(decision, RowDecision)]
        result = rows.spread(mask, dtype)
        for part in tokens:
            result = replace(result, weights=result.weights * part.weights, keep=result.keep & part.keep)
        combined = result if tokens else rows
        metrics |= kept_fractions("correction/", combined, evidence) | _weights(result, rows, not tokens, evidence)
        return replace(result, metrics=metrics)

    return joint


def measuring(rules: Sequence[BoundRule], *, whole_minibatch: bool = False) -> Callable[[Evidence], Correction]:
    """The correction of no rule, with the metrics that each of `rules` would have: what they would do, undone."""
    joint, nothing = compose(rules, whole_minibatch=whole_minibatch), compose(())

    def measured(evidence: Evidence) -> Correction:
        applied = nothing(evidence)
        return replace(applied, metrics={**joint(evidence).metrics, **applied.metrics})

    return measured


def labelled(rules: Sequence[BoundRule]) -> list[BoundRule]:
    """`rules` with names of their own in metrics: `NAME@RATIO` for each of those that read several ratios, else `NAME`.

    Labels that are there already stay, so that some of a run's rules are called as all of them are.

    Raises:
        ConfigError: a rule named twice on one ratio.
    """
    names, pairs = [bound.rule.name for bound in rules], [(bound.rule.name, bound.ratio) for bound in rules]
    for name, ratio in pairs:
        if pairs.count((name, ratio)) > 1:
            raise ConfigError(
                "a correction is listed twice on one ratio",
                where="correction.rules",
                got=f"{name} on {ratio}",
                expected="each rule once on a ratio",
                fix="remove one of the two, or give it another ratio in its thresholds",
            )
    several = {name for name in names if names.count(name) > 1}
    labels = [f"{bound.rule.name}@{bound.ratio}" if bound.rule.name in several else bound.rule.name for bound in rules]
    return [replace(bound, label=bound.label or label) for bound, label in zip(rules, labels, strict=True)]


def _of_rows(decisions: Sequence[RowDecision], mask: Tensor) -> RowDecision:
    """Several decisions on rows as one, before anything is spread over tokens."""
    if not decisions:
        return RowDecision(torch.ones(len(mask), dtype=torch.bool, device=mask.device), None, {})
    keep = reduce(operator.and_, [decision.keep for decision in decisions])
    weighing = [decision.weights for decision in decisions if decision.weights is not None]
    return RowDecision(keep, torch.where(keep, reduce(operator.mul, weighing), 0.0) if weighing else None, {})


def _weights(result: Correction, rows: RowDecision, by_rows: bool, evidence: Evidence) -> summable.Summable:
    """Moments of the joint weights, 0 for what was dropped; from the rows alone where rows are all there is."""
    packing = evidence.ratios.packing
    if by_rows:
        tokens = packing.lengths.double()
        weights = rows.keep.double() if rows.weights is None else rows.weights.double()
    else:
        # What is kept is on the mask.
        tokens, weights = None, torch.where(result.keep, result.weights, 0.0)
    moments = {"sum": weights, "square": weights**2}
    return {
        **{
            f"correction/weight:{role}": (values if tokens is None else tokens * values).sum(dtype=torch.float64)
            for role, values in moments.items()
        },
        "correction/weight:count": packing.token_count,
    }
