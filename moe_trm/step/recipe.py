"""From configuration to the mathematics of a run: preset and rules, loss, aggregation, all names and parameters
checked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from moe_trm import corrections, losses
from moe_trm.config.schema import Config, LossConfig, RuleConfig
from moe_trm.corrections import BoundRule, RegisteredRule
from moe_trm.corrections.by_length import LengthTracker
from moe_trm.corrections.calibration import check_by_length
from moe_trm.corrections.compose import labelled
from moe_trm.errors import ConfigError
from moe_trm.functions.parameters import Parameter
from moe_trm.losses import BoundLoss
from moe_trm.methods.losses import DEFAULT_LOSS
from moe_trm.ratios import PARTS
from moe_trm.step.passes import UNMEASURED

FROM_ANCHORS = ("engine", "lag", "merged")
"""Ratios that do not move while the weights are updated."""
HIDDEN = ("engine", "lag", "staleness")
"""Ratios that need log-probs of the learner under the weights that sampled."""


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
    entropy: bool
    entropy_coef: float
    acts: bool = True

    @property
    def whole_rules(self) -> bool:
        """True when corrections need the whole minibatch at once."""
        return self.batch_normalize != "off" or any(bound.rule.scope == "batch" for bound in self.rules)

    @property
    def whole_loss(self) -> bool:
        """True when the loss needs the whole minibatch at once."""
        return self.loss.loss.scope == "batch"

    @property
    def moves(self) -> bool:
        """True when what is computed over the whole minibatch changes with the weights in training."""
        return self.whole_loss or any(bound.ratio not in FROM_ANCHORS for bound in self.rules)


def recipe(config: Config) -> Recipe:
    """The recipe that `correction`, `loss` and `rollout.max_new_tokens` describe.

    Raises:
        ConfigError: an unknown name, threshold or parameter, or a combination that cannot work.
    """
    correction = config.correction
    preset = corrections.presets[correction.preset] if correction.preset else None
    rules = [corrections.get(name).bind(**thresholds) for name, thresholds in (preset.rules if preset else ())]
    uncalibrated = []
    for item in correction.rules:
        if item.by_length and item.target_reject_rate is None:
            raise ConfigError(
                "a threshold by length is chosen from a target",
                where=f"correction {item.name}, by_length",
                got="by_length without target_reject_rate",
                expected="both, or neither",
            )
        if item.target_reject_rate is None:
            rules.append(corrections.get(item.name).bind(**item.thresholds))
        else:
            uncalibrated.append(_uncalibrated(item, item.target_reject_rate))
    named = labelled([*rules, *map(placeholder, uncalibrated)])
    rules, pending = named[: len(rules)], named[len(rules) :]
    uncalibrated = [replace(item, label=bound.label) for item, bound in zip(uncalibrated, pending, strict=True)]
    _check_known([*rules, *pending], config)
    corrections.compose([*rules, *pending], whole_minibatch=True)
    if correction.batch_normalize != "off" and not any(bound.weighs for bound in [*rules, *pending]):
        raise ConfigError(
            "there are no weights to normalise",
            where="correction.batch_normalize",
            got=correction.batch_normalize,
            expected="off, or a rule that weighs: "
            + ", ".join(name for name in corrections.names() if corrections.get(name).weighs),
        )
    loss = _loss(config.loss, preset.loss if preset else None)
    _check_interpolated([*rules, *pending], loss, config)
    _check_counted_once([*rules, *pending], loss)
    return Recipe(
        rules=tuple(rules),
        uncalibrated=tuple(uncalibrated),
        batch_normalize=correction.batch_normalize,
        loss=loss,
        aggregation=config.loss.aggregation or loss.loss.aggregation,
        horizon=config.rollout.max_new_tokens,
        kl_estimator=config.kl.estimator,
        kl_ratio=config.kl.ratio,
        kl_clip=config.kl.clip,
        rollout_kl_coef=config.loss.rollout_kl_coef,
        entropy=config.loss.measure_entropy or config.loss.entropy_coef > 0 or "entropy" in loss.loss.needs,
        entropy_coef=config.loss.entropy_coef,
    )


def _check_known(rules: Sequence[BoundRule], config: Config) -> None:
    """Rules may read only what `pipeline.behavior` lets be known."""
    recovery = config.pipeline.recovery
    if recovery == "bypass" and any(bound.ratio == "merged" for bound in rules):
        raise ConfigError(
            "there is no proximal policy in bypass, so proximal / rollout is 1 on every token and corrects nothing",
            where="correction.preset" if config.correction.preset else "correction.rules",
            got=f"{config.correction.preset or 'ratio=merged'} with pipeline.behavior=bypass",
            expected="a preset or rules on the total ratio",
            fix="choose a bypass_* preset, give rules ratio=total, or set pipeline.behavior to snapshot or merged",
        )
    hidden = HIDDEN if recovery in ("merged", *UNMEASURED) else ()
    for bound in rules:
        if bound.ratio in hidden:
            raise ConfigError(
                f"rule {bound.rule.name} reads a ratio that is not known when log-probs under older weights are not",
                where="correction.rules",
                got=f"ratio={bound.ratio} with pipeline.behavior={recovery}",
                expected="ratio=total" if recovery == "bypass" else "ratio=merged or ratio=total",
                fix="give the rule that ratio in its thresholds, or set pipeline.behavior=snapshot",
            )


def _check_interpolated(rules: Sequence[BoundRule], loss: BoundLoss, config: Config) -> None:
    """An anchor that depends on the policy in training is not known before the update, when a whole minibatch is looked
    at.
    """
    whole = [bound.rule.name for bound in rules if bound.rule.scope == "batch"]
    whole += [f"loss {loss.loss.name}"] if loss.loss.scope == "batch" else []
    whole += ["batch_normalize"] if config.correction.batch_normalize != "off" else []
    if config.pipeline.recovery == "interpolate" and whole:
        raise ConfigError(
            "an interpolated anchor is not known before the update, and these look at the whole minibatch before it",
            where="pipeline.behavior",
            got=f"interpolate with {', '.join(whole)}",
            expected="snapshot, merged or bypass",
        )


def _check_counted_once(rules: Sequence[BoundRule], loss: BoundLoss) -> None:
    """Each part of the total ratio may enter the coefficient of a token once: in the loss, or as the weight of one
    rule.
    """
    held = dict.fromkeys(loss.contains, f"loss {loss.loss.name}")
    for bound in (one for one in rules if one.weighs):
        again = [part for part in ("engine", "lag", "update") if part in PARTS[bound.ratio] and part in held]
        if again:
            raise ConfigError(
                f"the ratio would be counted twice: {held[again[0]]} contains its {' and '.join(again)} part already",
                where="correction.rules",
                got=f"{bound.rule.name} weighs by ratio={bound.ratio}, beside {held[again[0]]}",
                expected="each part of the ratio to the rollout once",
                fix="use a rule that only rejects, such as trm_max, a rule on another ratio, or a loss without it",
            )
        held |= dict.fromkeys(PARTS[bound.ratio], f"rule {bound.rule.name}")


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
    chosen = sorted(set(rule.calibrated) & set(item.thresholds))
    if chosen:
        raise ConfigError(
            "a threshold is either given or chosen from a target",
            where=where,
            got=f"{', '.join(chosen)} and target_reject_rate={target}",
            expected="one of the two",
        )
    found = Uncalibrated(rule, target, dict(item.thresholds), by_length=item.by_length)
    if item.by_length:
        check_by_length(rule)
        placeholder(found).following(LengthTracker(target, rule.num_statistics).thresholds)
    return found


def _loss(config: LossConfig, of_preset: tuple[str, Mapping[str, float | str]] | None) -> BoundLoss:
    if of_preset and config.name not in (None, of_preset[0]):
        raise ConfigError(
            "the preset has its own loss",
            where="loss.name",
            got=config.name,
            expected=f"none or {of_preset[0]}",
            fix="choose a decoupled preset, which takes any loss, or write the rules out in correction.rules",
        )
    name, parameters = of_preset or (config.name or DEFAULT_LOSS, {})
    typed: dict[str, Parameter] = {
        key: value
        for key, value in (
            ("clip_low", config.clip_low),
            ("clip_high", config.clip_high),
            ("dual_clip", config.dual_clip),
        )
        if value is not None
    }
    twice = sorted(set(typed) & set(config.parameters))
    if twice:
        raise ConfigError(
            "a loss parameter is given twice",
            where="loss.parameters",
            got=", ".join(twice),
            expected="once, as a field",
        )
    return losses.get(name).bind(**{**parameters, **typed, **config.parameters})
