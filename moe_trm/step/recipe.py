"""From configuration to the mathematics of a run: preset and rules, loss, aggregation, all names and parameters
checked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from moe_trm import corrections, losses
from moe_trm.config.correction_rules import LossFacts, RuleFacts, contradictions, preset_of
from moe_trm.config.problems import refuse
from moe_trm.config.schema import Config, LossConfig, RuleConfig
from moe_trm.corrections import BoundRule, RegisteredRule
from moe_trm.corrections.by_length import LengthTracker
from moe_trm.corrections.calibration import check_by_length
from moe_trm.corrections.compose import labelled
from moe_trm.errors import ConfigError, refuse_together
from moe_trm.losses import BoundLoss
from moe_trm.methods.losses import DEFAULT_LOSS
from moe_trm.methods.own import is_own
from moe_trm.methods.parameters import Parameter
from moe_trm.methods.presets import Preset
from moe_trm.step.trial import try_loss, try_rule
from routing.replay.router_losses import RouterTerms

FROM_ANCHORS = ("engine", "lag", "merged")
"""Ratios that do not move while the weights are updated."""


@dataclass(frozen=True)
class Uncalibrated:
    """A rule whose threshold is yet to be chosen: `fixed` are its other thresholds and the ratio it reads.

    `label` is its name in metrics and among the thresholds that are kept. `by_length`: the threshold depends on the
    length of a row and follows the run.
    """

    rule: RegisteredRule
    target_reject_rate: float
    fixed: Mapping[str, float | str] = field(default_factory=dict)
    label: str = ""
    by_length: bool = False

    @property
    def name(self) -> str:
        """The name that its metrics and thresholds go by."""
        return self.label or self.rule.name


@dataclass(frozen=True)
class Recipe:
    """Mathematics of a run, from log-probs to the loss.

    Attributes:
        rules: corrections with their thresholds.
        uncalibrated: corrections that measure first.
        acts: whether corrections change anything, or only measure.
        batch_normalize: over what the weights are divided by their mean.
        loss: the policy objective.
        aggregation: how token losses become one number; `horizon` is the constant length of `seq-mean-token-sum-norm`.
        kl_estimator: the KL to the reference, where there is one; `kl_ratio` weighs `k3_is`, up to 1 + `kl_clip`.
        rollout_kl_coef: of the soft KL to the policy that sampled.
        router_terms: coefficients of the routers' own losses; None: they have none.
        entropy: whether updates need the policy's entropy; `entropy_coef` is its bonus.
    """

    rules: tuple[BoundRule, ...]
    uncalibrated: tuple[Uncalibrated, ...]
    batch_normalize: Literal["off", "token", "sequence"]
    loss: BoundLoss
    aggregation: str
    horizon: int
    kl_estimator: str
    kl_ratio: str
    kl_clip: float | None
    rollout_kl_coef: float
    router_terms: RouterTerms | None
    entropy: bool
    entropy_coef: float
    acts: bool = True

    @property
    def rules_read_minibatch(self) -> bool:
        """True when corrections need the whole minibatch at once."""
        return self.batch_normalize != "off" or any(bound.rule.scope == "batch" for bound in self.rules)

    @property
    def loss_reads_minibatch(self) -> bool:
        """True when the loss needs the whole minibatch at once."""
        return self.loss.loss.scope == "batch"

    @property
    def moves(self) -> bool:
        """True when what is computed over the whole minibatch changes with the weights in training."""
        return self.loss_reads_minibatch or any(bound.ratio not in FROM_ANCHORS for bound in self.rules)


def recipe(config: Config) -> Recipe:
    """The recipe that `correction`, `loss` and `rollout.max_new_tokens` describe.

    Raises:
        ConfigError: unknown names, thresholds or parameters, or a combination that cannot work; several at once where
            there are several.
    """
    correction = config.correction
    preset = preset_of(correction)
    checks: list[Callable[[], BoundRule | Uncalibrated | BoundLoss]] = [partial(_loss, config.loss, preset)]
    checks += [partial(_bound, name, thresholds) for name, thresholds in (preset.rules if preset else ())]
    checks += [partial(_rule, item) for item in correction.rules]
    bound_items = refuse_together(*checks)
    [loss] = [bound_item for bound_item in bound_items if isinstance(bound_item, BoundLoss)]
    rules = [bound_item for bound_item in bound_items if not isinstance(bound_item, BoundLoss)]
    bound_rules = [bound_item if isinstance(bound_item, BoundRule) else placeholder(bound_item) for bound_item in rules]
    refuse(
        "corrections and loss",
        contradictions(
            correction,
            config.loss,
            config.pipeline.recovery,
            [RuleFacts(bound.rule.name, bound.ratio, bound.rule.scope, bound.weighs) for bound in bound_rules],
            LossFacts(loss.loss.name, loss.loss.scope, loss.contains),
        ),
    )
    named = labelled(bound_rules)
    pairs = list(zip(rules, named, strict=True))
    return Recipe(
        rules=tuple(bound for bound_item, bound in pairs if isinstance(bound_item, BoundRule)),
        uncalibrated=tuple(
            replace(bound_item, label=bound.label)
            for bound_item, bound in pairs
            if isinstance(bound_item, Uncalibrated)
        ),
        batch_normalize=correction.batch_normalize,
        loss=loss,
        aggregation=config.loss.aggregation or loss.loss.aggregation,
        horizon=config.rollout.max_new_tokens,
        kl_estimator=config.kl.estimator,
        kl_ratio=config.kl.ratio,
        kl_clip=config.kl.clip,
        rollout_kl_coef=config.loss.rollout_kl_coef,
        router_terms=RouterTerms(config.loss.router_aux_coef, config.loss.router_z_coef)
        if config.loss.router_coefs
        else None,
        entropy=config.loss.measure_entropy or config.loss.entropy_coef > 0 or "entropy" in loss.loss.needs,
        entropy_coef=config.loss.entropy_coef,
    )


def _bound(name: str, thresholds: Mapping[str, float | str]) -> BoundRule:
    bound = corrections.get(name).bind(**thresholds)
    if is_own(name):
        try_rule(bound)
    return bound


def _rule(item: RuleConfig) -> BoundRule | Uncalibrated:
    if item.target_reject_rate is None:
        return _bound(item.name, item.thresholds)
    return _uncalibrated(item, item.target_reject_rate)


def placeholder(item: Uncalibrated) -> BoundRule:
    """The rule with an arbitrary threshold: for checking its other settings, never for rejecting."""
    return item.rule.bind(**{**dict.fromkeys(item.rule.calibrated, 1.0), **item.fixed})


def _uncalibrated(item: RuleConfig, target: float) -> Uncalibrated:
    rule, where = corrections.get(item.name), f"correction {item.name}, target_reject_rate"
    if rule.calibrate is None:
        raise ConfigError(
            "this rule cannot be calibrated: its threshold does not judge tokens or rows one by one",
            where=where,
            got=target,
            expected="thresholds given by value, or one of "
            + ", ".join(name for name in corrections.names() if corrections.get(name).calibrate is not None),
        )
    overlap = sorted(set(rule.calibrated) & set(item.thresholds))
    if overlap:
        raise ConfigError(
            "a threshold is either given or chosen from a target",
            where=where,
            got=f"{', '.join(overlap)} and target_reject_rate={target}",
            expected="one of the two",
        )
    uncalibrated = Uncalibrated(rule, target, dict(item.thresholds), by_length=item.by_length)
    if item.by_length:
        check_by_length(rule)
        placeholder(uncalibrated).following(LengthTracker(target, rule.num_statistics).thresholds)
    return uncalibrated


def _loss(config: LossConfig, preset: Preset | None) -> BoundLoss:
    name, parameters = (preset and preset.loss) or (config.name or DEFAULT_LOSS, {})
    typed: Mapping[str, Parameter] = {**parameters, **config.clips, **config.parameters}
    bound = losses.get(name).bind(**typed)
    if is_own(name):
        try_loss(bound)
    return bound
