"""Correction rules: functions that declare their ratio, their scope and their thresholds, and are checked and counted.

A rule is written as `f(evidence, log_ratio, *, thresholds...) -> Correction` and decorated with `@rule(ratio=...,
scope=...)`. It receives its ratio `[B, T]` detached and 0 off-mask. Metrics it returns are prefixed
`correction/<name>/`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from moe_trm.corrections.by_length import NUM_OCTAVES, LengthThresholds, octave_name, octave_of
from moe_trm.corrections.evidence import Correction, Evidence, RowDecision
from moe_trm.corrections.turns import Turns
from moe_trm.errors import ConfigError
from moe_trm.methods import summable
from moe_trm.methods.own import check_declaration
from moe_trm.methods.parameters import Parameter, bind, declared
from moe_trm.methods.ratios import RATIO_NAMES
from moe_trm.ratios import LogRatios

Ratio = Literal["engine", "staleness", "total"]
Scope = Literal["token", "sequence", "batch"]
RuleFunction = Callable[..., Correction | RowDecision]


@dataclass(frozen=True)
class RegisteredRule:
    """A correction rule, callable as `rule(evidence, **thresholds) -> Correction`.

    Attributes:
        name: registry name, used in metrics.
        ratio: the ratio it reads unless `ratio=` is given (`merged` and `update` are possible too).
        scope: `token`: each token alone; `sequence`: needs whole rows; `batch`: needs the whole minibatch.
        defaults: thresholds that may be left out, with their values.
        required: thresholds without a default, because no value is right for every model.
        calibrate: the thresholds at which given statistics are just kept, or None if no threshold stands for a reject
            rate.
        weighs: it gives weights other than 0 and 1, which `correction.batch_normalize` may normalise.
        rejects: its threshold rejects; False: it only weighs down what is beyond it.
        readable: the ratios that it may be told to read.
    """

    name: str
    ratio: str
    scope: Scope
    defaults: Mapping[str, Parameter]
    required: tuple[str, ...]
    function: RuleFunction
    calibrate: Callable[..., Mapping[str, Any]] | None = None
    weighs: bool = False
    rejects: bool = True
    readable: tuple[str, ...] = RATIO_NAMES

    @property
    def calibrated(self) -> tuple[str, ...]:
        """The thresholds that a target reject rate chooses; none if it cannot."""
        return tuple(self.calibrate(*[1.0] * self.num_statistics)) if self.calibrate else ()

    @property
    def num_statistics(self) -> int:
        """Number of statistics of a row or token that `calibrate` takes quantiles of."""
        return len(signature(self.calibrate).parameters) if self.calibrate else 0

    def __call__(self, evidence: Evidence, **thresholds: Parameter) -> Correction:
        return self.bind(**thresholds)(evidence)

    def bind(self, **thresholds: Parameter) -> BoundRule:
        """This rule with its thresholds, checked now on a minibatch without rows.

        Raises:
            ConfigError: unknown, missing or senseless thresholds, or a function that fails on no rows.
        """
        by_turn = self._by_turn(thresholds.get("scope", self.scope))
        thresholds = {name: value for name, value in thresholds.items() if name != "scope"}
        missing = next((name for name in self.required if name not in thresholds), "")
        fix = f"`moe-trm config explain {self.name}` says what {missing} is"
        if missing in self.calibrated:
            fix = "take a high quantile, such as the 95th percentile, of the rule's score in a run without corrections"
        where = f"correction {self.name}"
        ratio_and_thresholds = bind(
            self.function, self.ratio, thresholds, self.readable, what="threshold", where=where, missing_fix=fix
        )
        bound = BoundRule(self, *ratio_and_thresholds, by_turn=by_turn)
        _check_runs(bound)
        return bound

    def _by_turn(self, scope: Parameter) -> bool:
        if scope == self.scope:
            return False
        if scope != "turn" or self.scope != "sequence":
            raise ConfigError(
                "this rule cannot judge by that scope",
                where=f"correction {self.name}, scope",
                got=scope,
                expected="sequence or turn" if self.scope == "sequence" else self.scope,
            )
        return True


@dataclass(frozen=True)
class BoundRule:
    """A rule with the ratio it reads and all its thresholds: `bound(evidence) -> Correction`.

    `label` is its name in metrics where that is not the rule's (`compose.labelled`). `by_length` has quantiles that its
    calibrated thresholds are made of for each row, in the place of those in `thresholds`. `by_turn`: a rule on rows
    judges each turn as a row of its own, and keeps or drops the tokens of that turn alone.
    """

    rule: RegisteredRule
    ratio: str
    thresholds: Mapping[str, Parameter]
    label: str = ""
    by_length: LengthThresholds | None = None
    by_turn: bool = False

    @property
    def name(self) -> str:
        """The name that its metrics and thresholds go by."""
        return self.label or self.rule.name

    @property
    def weighs(self) -> bool:
        """True when it gives weights other than 0 and 1 at these thresholds."""
        return self.rule.weighs and self.thresholds.get("weight") != "one"

    def following(self, by_length: LengthThresholds) -> BoundRule:
        """This rule at thresholds by length.

        Raises:
            ConfigError: a function that takes no threshold for each row.
        """
        bound = replace(self, by_length=by_length)
        _check_runs(bound)
        return bound

    def __call__(self, evidence: Evidence) -> Correction:
        decision = self.decide(evidence)
        if isinstance(decision, RowDecision):
            return decision.spread(evidence.mask, evidence.ratios.get(self.ratio).dtype)
        return decision

    def decide(self, evidence: Evidence) -> Correction | RowDecision:
        """The same, not yet spread over tokens where rows are treated as a whole."""
        prefix = f"correction/{self.name}/"
        if not self.by_turn:
            decision = self.judge(evidence)
            return replace(decision, metrics={**decision.metrics, **kept_fractions(prefix, decision, evidence)})
        turns = Turns(evidence)
        decision = self.judge(turns.evidence)
        spread = turns.spread(decision)
        shares = turns.kept(prefix, decision) | kept_fractions(prefix, spread, evidence)
        return replace(spread, metrics={**decision.metrics, **shares})

    def judge(self, evidence: Evidence) -> Correction | RowDecision:
        """The decision on the rows of `evidence`, which are turns for a rule by turn, with the rule's own metrics."""
        log_ratio = evidence.ratios.get(self.ratio).detach()
        decision = self.rule.function(evidence, log_ratio, **self._thresholds(evidence.ratios.packing.lengths))
        _check_decision(decision, self.rule.name, evidence.mask)
        prefix = f"correction/{self.name}/"
        rule_metrics = {prefix + key: value for key, value in decision.metrics.items()}
        if isinstance(decision, RowDecision) and decision.score is not None:
            rule_metrics |= summable.mean(f"{prefix}score", decision.score, evidence.ratios.packing.some)
        if self.by_length is not None:
            rule_metrics |= rejected_by_octave(prefix, decision, evidence, self.by_length)
        return replace(decision, metrics=rule_metrics)

    def _thresholds(self, lengths: Tensor) -> Mapping[str, Any]:
        if self.by_length is None:
            return self.thresholds
        assert self.rule.calibrate is not None
        return {**self.thresholds, **self.rule.calibrate(*self.by_length.at(lengths).unbind(dim=1))}


def rule(
    *,
    ratio: Ratio,
    scope: Scope,
    calibrate: Callable[..., Mapping[str, Any]] | None = None,
    weighs: bool = False,
    rejects: bool = True,
    readable: tuple[str, ...] = RATIO_NAMES,
) -> Callable[[RuleFunction], RegisteredRule]:
    """Turn a function into a `RegisteredRule` of the same name; its keyword-only parameters are its thresholds.

    Raises:
        ConfigError: an unknown ratio or scope, or a signature that cannot be called.
    """

    def register(function: RuleFunction) -> RegisteredRule:
        choices = {"ratio": (ratio, RATIO_NAMES), "scope": (scope, get_args(Scope))}
        check_declaration(function, choices, what="correction", takes="evidence, log_ratio")
        required, defaults = declared(function)
        facts = (function, calibrate, weighs, rejects, readable)
        registered = RegisteredRule(function.__name__, ratio, scope, defaults, required, *facts)
        object.__setattr__(registered, "__doc__", function.__doc__)
        return registered

    return register


def kept_fractions(prefix: str, decision: Correction | RowDecision, evidence: Evidence) -> summable.Summable:
    """Share of sampled tokens kept, and of rows (with sampled tokens) that lost none."""
    packing = evidence.ratios.packing
    if isinstance(decision, RowDecision):
        kept_tokens, intact = torch.where(decision.keep, packing.lengths, 0), decision.keep
    else:
        kept_tokens = (decision.keep & evidence.mask).count_nonzero(dim=1)
        intact = kept_tokens == packing.lengths
    return {
        f"{prefix}kept_sequence_fraction:sum": summable.count(intact & packing.some),
        f"{prefix}kept_sequence_fraction:count": packing.row_count,
        f"{prefix}kept_fraction:sum": kept_tokens.sum(dtype=torch.float64),
        f"{prefix}kept_fraction:count": packing.token_count,
    }


def rejected_by_octave(
    prefix: str, decision: Correction | RowDecision, evidence: Evidence, thresholds: LengthThresholds
) -> summable.Summable:
    """Share of rows that a rule by length drops (or drops tokens of), by octave of length; and of those that it cannot
    judge yet, `unjudged_fraction`. Rows that no threshold can reject are not counted.
    """
    lengths, mask = evidence.ratios.packing.lengths, evidence.mask
    rows = lengths > 0 if decision.judged is None else (lengths > 0) & decision.judged
    dropped = ~decision.keep if isinstance(decision, RowDecision) else (mask & ~decision.keep).any(dim=1)
    octave, zero = octave_of(lengths).clamp(min=0), lengths.new_zeros(NUM_OCTAVES, dtype=torch.float64)
    num_rows, num_dropped = (zero.index_add(0, octave, (rows & subset).double()) for subset in (rows, dropped))
    metrics = summable.fraction(f"{prefix}unjudged_fraction", thresholds.at(lengths).isinf().any(dim=1), rows)
    for number in range(NUM_OCTAVES):
        name = f"{prefix}rejected_length_{octave_name(number)}"
        metrics |= {f"{name}:sum": num_dropped[number], f"{name}:count": num_rows[number]}
    return metrics


def _check_decision(decision: object, name: str, mask: Tensor) -> None:
    """Refuse what `compose` would broadcast or fail on."""
    if isinstance(decision, Correction):
        shapes, expected = [decision.weights.shape, decision.keep.shape], mask.shape
    elif isinstance(decision, RowDecision):
        shapes = [value.shape for value in (decision.keep, decision.weights) if value is not None]
        expected = mask.shape[:1]
    else:
        raise ConfigError(
            "a correction returns a Correction or a RowDecision",
            where=f"correction {name}",
            got=type(decision).__name__,
            expected="Correction(weights, keep, metrics), of moe_trm.corrections",
        )
    if any(shape != expected for shape in shapes) or decision.keep.dtype is not torch.bool:
        raise ConfigError(
            "a correction returns weights and a bool mask, one of each for every token (RowDecision: for every row)",
            where=f"correction {name}",
            got=f"shapes {', '.join(str(tuple(shape)) for shape in shapes)}, keep of {decision.keep.dtype}",
            expected=f"shape {tuple(expected)}, keep of torch.bool",
        )


def _check_runs(bound: BoundRule) -> None:
    """Refuse a function that fails on no rows."""
    try:
        bound(_no_evidence())
    except ConfigError:
        raise
    except Exception as error:
        by_row = " and thresholds of shape [0]" if bound.by_length is not None else ""
        raise ConfigError(
            f"the correction fails on a minibatch without rows{by_row}",
            where=f"correction {bound.rule.name}",
            got=f"{type(error).__name__}: {error}",
            expected="a Correction of shape [0, 1], or a RowDecision of shape [0]",
        ) from error


def _no_evidence() -> Evidence:
    nothing = torch.zeros(0, 1)
    ratios = LogRatios(nothing, nothing, nothing, nothing.bool())
    return Evidence(ratios, advantages=nothing, exact_kl=nothing, turn_ids=nothing.int())
