"""Corrections on plain tensors, for trainers that have no records, no configuration and no `Evidence`.

Shape letters: B sequences, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from moe_trm.corrections import get, presets
from moe_trm.corrections.batch_norm import normalized, weight_sums
from moe_trm.corrections.compose import compose, labelled
from moe_trm.corrections.evidence import Correction, Evidence
from moe_trm.corrections.rule import BoundRule
from moe_trm.errors import ConfigError
from moe_trm.methods import summable
from moe_trm.methods.parameters import Parameter
from moe_trm.methods.ratios import PARTS
from moe_trm.ratios import LogRatios

RuleSpec = str | tuple[str, Mapping[str, Parameter]] | BoundRule
"""A rule by name, by name with thresholds, or bound already."""
Rules = str | Sequence[RuleSpec]
"""The name of a preset, or rules."""


@dataclass(frozen=True)
class Corrected:
    """Decision of the rules.

    Attributes:
        weights: `[B, T]`, detached: multiplies the policy term of each token; 0 where nothing was sampled.
        keep: `[B, T]` bool: False removes the token from the gradient, and never from a denominator.
        metrics: plain numbers under the names of docs/methods.md.
    """

    weights: Tensor
    keep: Tensor
    metrics: Mapping[str, float]


def bind(rules: Rules) -> tuple[BoundRule, ...]:
    """The rules with their thresholds, checked.

    Args:
        rules: the name of a preset, such as `decoupled_geo_rs_token_tis`, whose loss is left to the caller; or rules,
            each a name, a pair of name and thresholds (`("icepop", {"low": 0.5, "high": 2.0})`; `ratio` is one of
            them), or a bound rule.

    Raises:
        ConfigError: an unknown name, or unknown, missing or senseless thresholds.
    """
    if isinstance(rules, str):
        if rules not in presets:
            raise ConfigError(
                "unknown preset",
                where="moe_trm.corrections.plain",
                got=rules,
                expected=", ".join(presets),
                fix="a single rule goes in a list: [(NAME, {THRESHOLD: VALUE})]",
            )
        specs: Iterable[RuleSpec] = presets[rules].rules
    else:
        specs = rules
    bound = []
    for spec in specs:
        name, thresholds = (spec, {}) if isinstance(spec, str | BoundRule) else spec
        bound.append(name if isinstance(name, BoundRule) else get(name).bind(**thresholds))
    return tuple(labelled(bound))


def correct(
    rules: Rules,
    *,
    rollout_logprobs: Tensor,
    mask: Tensor,
    current_logprobs: Tensor | None = None,
    advantages: Tensor | None = None,
    behavior_logprobs: Tensor | None = None,
    proximal_logprobs: Tensor | None = None,
    exact_kl: Tensor | None = None,
    turn_ids: Tensor | None = None,
    whole_minibatch: bool = False,
    batch_normalize: Literal["off", "token", "sequence"] = "off",
) -> Corrected:
    """Weights and keep mask of a micro-batch under `rules`, as a run by configuration has them.

    `loss = (weights * policy_term)[keep].sum() / (mask.sum() of the whole batch)` is one way to use them.

    Args:
        rules: as in `bind`.
        rollout_logprobs: `[B, T]`, of the engine that sampled.
        mask: `[B, T]`, true on sampled tokens; other values of all tensors may be anything.
        current_logprobs: `[B, T]`, of the policy in training. None: not known here. Then rules read `engine`, `lag` or
            `merged`.
        advantages: `[B, T]`. None: not known here, and rules that read them are refused.
        behavior_logprobs: `[B, T]`, of the learner under the weights that sampled. None: these weights are gone. Then
            rules read `merged`, `update` or `total`.
        proximal_logprobs: `[B, T]`, of the learner's weights when the step began. None: `behavior_logprobs`.
        exact_kl: `[B, T]` KL of each context over a recorded support, where it is known.
        turn_ids: `[B, T]` turn of each token, for rules by turn.
        whole_minibatch: True where these rows are all of the update, over all ranks; rules of batch scope and
            `batch_normalize` need that.
        batch_normalize: divide the weights by their mean, over tokens or rows.

    Raises:
        ConfigError: rules that cannot be bound, that read what is not given, or that need the whole minibatch; tensors
            of different shapes; weights that are not finite.
    """
    tensors = {
        "rollout_logprobs": rollout_logprobs,
        "current_logprobs": current_logprobs,
        "advantages": advantages,
        "behavior_logprobs": behavior_logprobs,
        "proximal_logprobs": proximal_logprobs,
        "exact_kl": exact_kl,
        "turn_ids": turn_ids,
    }
    _check_shapes(mask, tensors)
    if batch_normalize != "off" and not whole_minibatch:
        raise ConfigError(
            "the mean of the weights is known over the whole minibatch alone",
            where="batch_normalize",
            got=f"{batch_normalize} with whole_minibatch=False",
            expected="whole_minibatch=True, or off",
        )
    bound = bind(rules)
    evidence = _evidence(bound, tensors, mask)
    correction: Correction = compose(bound, whole_minibatch=whole_minibatch)(evidence)
    metrics = dict(correction.metrics)
    if batch_normalize != "off":
        weighing = compose([rule for rule in bound if rule.weighs], whole_minibatch=True)(evidence)
        correction = normalized(correction, weight_sums(weighing, evidence.mask, batch_normalize))
        metrics |= summable.moments("correction/weight", correction.weights, evidence.mask)
    correction = replace(correction, metrics=metrics)
    if not correction.weights[evidence.mask].isfinite().all():
        raise ConfigError(
            "a rule's weights are no finite numbers",
            where="moe_trm.corrections.plain",
            got=", ".join(rule.rule.name for rule in bound),
            expected="a finite weight on every sampled token",
            fix="look for log-probs that are not finite on tokens that the mask has, and for a division in your rule",
        )
    return Corrected(correction.weights, correction.keep, summable.finalize(correction.metrics))


class _WithoutAdvantages(Evidence):
    """Evidence whose advantages are not known: a rule that reads them is refused, and never given zeros."""

    def __getattribute__(self, name: str) -> Any:
        if name == "advantages":
            raise ConfigError(
                "a rule reads advantages, and they are not known here",
                where="moe_trm.corrections.plain",
                got="advantages=None",
                expected="one for each token",
                fix="choose rules on ratios alone, such as trm_max or icepop",
            )
        return super().__getattribute__(name)


def _evidence(bound: Sequence[BoundRule], tensors: Mapping[str, Tensor | None], mask: Tensor) -> Evidence:
    current = tensors["current_logprobs"]
    if current is None:
        moving = [rule for rule in bound if "update" in PARTS[rule.ratio]]
        if moving:
            raise ConfigError(
                f"rule {moving[0].rule.name} reads a ratio to the policy in training, which is not known here",
                where="moe_trm.corrections.plain",
                got=f"ratio={moving[0].ratio} without current_logprobs",
                expected="ratio=merged, or ratio=engine where the weights that sampled are known",
                fix="give the rule that ratio in its thresholds",
            )
        current = tensors["behavior_logprobs"] if tensors["proximal_logprobs"] is None else tensors["proximal_logprobs"]
    rollout, advantages = tensors["rollout_logprobs"], tensors["advantages"]
    assert rollout is not None
    # Without any log-probs of the learner, `LogRatios` says what is missing.
    current = rollout if current is None else current
    ratios = LogRatios(rollout, tensors["behavior_logprobs"], current.detach(), mask, tensors["proximal_logprobs"])
    kind = _WithoutAdvantages if advantages is None else Evidence
    return kind(
        ratios,
        torch.full_like(rollout, torch.nan) if advantages is None else advantages,
        turn_ids=tensors["turn_ids"],
        exact_kl=tensors["exact_kl"],
    )


def _check_shapes(mask: Tensor, tensors: Mapping[str, Tensor | None]) -> None:
    if mask.ndim != 2:
        raise ConfigError("a mask of sampled tokens has two dimensions", got=tuple(mask.shape), expected="[B, T]")
    for name, value in tensors.items():
        if value is not None and value.shape != mask.shape:
            raise ConfigError(
                "a tensor has another shape than the mask",
                where=name,
                got=tuple(value.shape),
                expected=tuple(mask.shape),
                fix="give one value for each token; advantages of rows are expanded",
            )
