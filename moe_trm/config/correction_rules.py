"""Rules between corrections, the loss and what is known of the policy that sampled. See `moe_trm.config.rules`.

Built-in methods are known from their table. `moe_trm.step.recipe` asks `contradictions` again once it has loaded those
of the user's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from moe_trm.config.problems import Problem
from moe_trm.config.schema import (
    WITHOUT_ANCHOR_PASS,
    CorrectionConfig,
    LossConfig,
    Recovery,
    RolloutConfig,
    RuleConfig,
)
from moe_trm.methods.corrections import CORRECTIONS
from moe_trm.methods.losses import DEFAULT_LOSS, LOSSES, contained
from moe_trm.methods.presets import PRESETS, Preset, RuleSpec
from moe_trm.methods.ratios import PARTS

RULES, LOSS = "correction.rules", "loss.name"
HIDDEN = ("engine", "lag", "staleness")
"""Ratios that need log-probs of the learner under the weights that sampled."""


@dataclass(frozen=True)
class RuleFacts:
    """A correction as it is configured: the ratio it reads, and whether it gives weights other than 0 and 1."""

    name: str
    ratio: str
    scope: str
    weighs: bool


@dataclass(frozen=True)
class LossFacts:
    """The loss as it is configured; `contains` are the parts of the total ratio that its gradient depends on."""

    name: str
    scope: str
    contains: frozenset[str]


def refusals(
    correction: CorrectionConfig,
    loss: LossConfig,
    *,
    recovery: Recovery,
    replay_mode: str,
    rollout: RolloutConfig,
    keeps_masks: bool,
) -> Iterator[Problem]:
    """The reasons that these settings cannot work, as far as the table of built-in methods tells.

    `replay_mode` is settled; `keeps_masks`: the rollout's distribution is recorded.
    """
    for rule in correction.rules:
        yield from _exact_divergence(rule, keeps_masks=keeps_masks)
        if rule.thresholds.get("tokens") == "post_tool" and not rollout.may_have_turns:
            yield Problem(
                RULES,
                f"rule {rule.name} weighs tokens after tools, and without a rollout function or an agent every sample "
                "is one turn",
                got="tokens=post_tool with rollout.function=null and rollout.agent=null",
                expected="tokens left out, or one of the two",
            )
        if rule.thresholds.get("scope") == "turn" and not rollout.may_have_turns:
            yield Problem(
                RULES,
                f"rule {rule.name} judges turns, and without a rollout function or an agent every sample is one turn",
                got="scope=turn with rollout.function=null and rollout.agent=null",
                expected="scope left out, or one of the two",
            )
    preset = preset_of(correction)
    if preset is not None and preset.bypass and replay_mode == "R2":
        yield Problem(
            "replay.mode",
            "R2 replays the routes of the proximal pass, which plays no part in bypass mode",
            got=f"R2 with correction.preset={correction.preset}",
            expected="R3 or none",
        )
    rules = [_rule_facts(name, thresholds) for name, thresholds in rules_of(correction)]
    yield from contradictions(correction, loss, recovery, [rule for rule in rules if rule], loss_facts(loss, preset))


def preset_of(correction: CorrectionConfig) -> Preset | None:
    """The preset that is named, if one is."""
    return PRESETS[correction.preset] if correction.preset else None


def rules_of(correction: CorrectionConfig) -> list[RuleSpec]:
    """Name and thresholds of every correction, the preset's first."""
    preset = preset_of(correction)
    return [*(preset.rules if preset else ()), *((rule.name, rule.thresholds) for rule in correction.rules)]


def ratio_of(name: str, thresholds: Mapping[str, float | str]) -> str | None:
    """The ratio that a correction reads; None: a rule of the user's own that does not say it here."""
    built_in_ratio = CORRECTIONS[name].ratio if name in CORRECTIONS else None
    return str(thresholds["ratio"]) if "ratio" in thresholds else built_in_ratio


def contradictions(
    correction: CorrectionConfig,
    loss: LossConfig,
    recovery: Recovery,
    rules: Sequence[RuleFacts],
    loss_facts: LossFacts | None,
) -> Iterator[Problem]:
    """Contradictions between corrections, the loss and `recovery`, which says what is known of the weights that
    sampled.

    `rules`: those that are known, of the preset and of `correction.rules`. `loss_facts`: the loss, None where it is not
    known.
    """
    yield from _thresholds(correction)
    yield from _loss(loss, preset_of(correction), correction.preset)
    yield from _known(correction, recovery, rules)
    yield from _whole_minibatch(correction, recovery, rules, loss_facts)
    preset = preset_of(correction)
    of_preset = [name for name, _ in (preset.rules if preset else ())]
    origin = f" (of correction.preset={correction.preset}: {', '.join(of_preset)})" if of_preset else ""
    yield from (replace(problem, got=f"{problem.got}{origin}") for problem in _counted_once(rules, loss_facts))
    has_unknown_rules = len(rules) < len(rules_of(correction))
    if correction.batch_normalize != "off" and not has_unknown_rules and not any(rule.weighs for rule in rules):
        yield Problem(
            "correction.batch_normalize",
            "there are no weights to normalise",
            got=correction.batch_normalize,
            expected="off, or a rule that weighs: "
            + ", ".join(name for name, entry in sorted(CORRECTIONS.items()) if entry.weighs),
        )


def _rule_facts(name: str, thresholds: Mapping[str, float | str]) -> RuleFacts | None:
    entry, ratio = CORRECTIONS.get(name), ratio_of(name, thresholds)
    if entry is None or ratio is None:
        return None
    return RuleFacts(name, ratio, entry.scope, entry.weighs and thresholds.get("weight", entry.weight) != "one")


def loss_facts(loss: LossConfig, preset: Preset | None) -> LossFacts | None:
    """Facts of the loss, from the preset where it has one; None: the user's own loss."""
    name, parameters = (preset and preset.loss) or (loss.name or DEFAULT_LOSS, {})
    entry = LOSSES.get(name)
    if entry is None:
        return None
    ratio = str({**parameters, **loss.parameters}.get("ratio", entry.ratio))
    return LossFacts(name, entry.scope, contained(entry.holds, ratio) if ratio in PARTS else frozenset())


def _thresholds(correction: CorrectionConfig) -> Iterator[Problem]:
    for rule in correction.rules:
        if rule.by_length and rule.target_reject_rate is None:
            yield Problem(
                RULES,
                f"rule {rule.name}: a threshold by length is chosen from a target",
                got="by_length without target_reject_rate",
                expected="both, or neither",
            )
    pairs = [(name, ratio_of(name, thresholds) or "its own") for name, thresholds in rules_of(correction)]
    for name, ratio in sorted({pair for pair in pairs if pairs.count(pair) > 1}):
        yield Problem(
            RULES,
            f"rule {name} is listed more than once on one ratio, and its metrics would overwrite each other",
            got=f"{pairs.count((name, ratio))} times on {ratio} ratio",
            expected="once on a ratio, those of correction.preset included",
        )


def _loss(loss: LossConfig, preset: Preset | None, name: str | None) -> Iterator[Problem]:
    if preset is not None and preset.loss is not None and loss.name not in (None, preset.loss[0]):
        yield Problem(
            LOSS,
            f"correction.preset={name} has its own loss",
            got=str(loss.name),
            expected=f"none or {preset.loss[0]}",
            fix="choose a decoupled preset, which takes any loss, or write the rules out in correction.rules",
        )
    twice = sorted(loss.clips.keys() & loss.parameters.keys())
    if twice:
        yield Problem("loss.parameters", "a loss parameter is given twice", got=", ".join(twice), expected="once")


def _exact_divergence(rule: RuleConfig, *, keeps_masks: bool) -> Iterator[Problem]:
    if rule.thresholds.get("divergence") != "exact":
        return
    if not keeps_masks:
        yield Problem(
            "sampling_mask.mode",
            f"rule {rule.name} with divergence=exact needs the rollout's distribution, "
            "which is recorded with the sampling mask",
            got="off",
            expected="keep",
            fix="set sampling_mask.mode=keep, or divergence=sampled",
        )
    if rule.thresholds.get("ratio", "total") != "total":
        yield Problem(
            RULES,
            f"rule {rule.name} with divergence=exact compares the rollout with the current policy, "
            "which is the total ratio",
            got=f"ratio={rule.thresholds['ratio']}",
            expected="ratio left out",
        )


def _known(correction: CorrectionConfig, recovery: Recovery, rules: Sequence[RuleFacts]) -> Iterator[Problem]:
    """Rules may read only what `pipeline.behavior` lets be known."""
    if recovery == "bypass" and any(rule.ratio == "merged" for rule in rules):
        yield Problem(
            "correction.preset" if correction.preset else RULES,
            "there is no proximal policy in bypass, so proximal / rollout is 1 on every token and corrects nothing",
            got=f"{correction.preset or 'ratio=merged'} with pipeline.behavior=bypass",
            expected="a preset or rules on the total ratio",
            fix="choose a bypass_* preset, give rules ratio=total, or set pipeline.behavior to snapshot or merged",
        )
    hidden = HIDDEN if recovery in ("merged", *WITHOUT_ANCHOR_PASS) else ()
    for rule in rules:
        if rule.ratio in hidden:
            yield Problem(
                RULES,
                f"rule {rule.name} reads a ratio that is not known when log-probs under older weights are not",
                got=f"ratio={rule.ratio} with pipeline.behavior={recovery}",
                expected="ratio=total" if recovery == "bypass" else "ratio=merged or ratio=total",
                fix="give the rule that ratio in its thresholds, or set pipeline.behavior=snapshot",
            )


def _whole_minibatch(
    correction: CorrectionConfig, recovery: Recovery, rules: Sequence[RuleFacts], loss: LossFacts | None
) -> Iterator[Problem]:
    """An anchor that depends on the policy in training is not known before the update, when a whole minibatch is looked
    at.
    """
    batch_methods = [rule.name for rule in rules if rule.scope == "batch"]
    batch_methods += [f"loss {loss.name}"] if loss and loss.scope == "batch" else []
    batch_methods += ["batch_normalize"] if correction.batch_normalize != "off" else []
    if recovery == "interpolate" and batch_methods:
        yield Problem(
            "pipeline.behavior",
            "an interpolated anchor is not known before the update, and these look at the whole minibatch before it",
            got=f"interpolate with {', '.join(batch_methods)}",
            expected="snapshot, merged or bypass",
        )


def _counted_once(rules: Sequence[RuleFacts], loss: LossFacts | None) -> Iterator[Problem]:
    """Each part of the total ratio may enter the coefficient of a token once: in the loss, or as the weight of one
    rule.
    """
    held = dict.fromkeys(loss.contains, f"loss {loss.name}") if loss else {}
    for rule in (candidate for candidate in rules if candidate.weighs):
        parts = PARTS.get(rule.ratio, frozenset())
        again = [part for part in ("engine", "lag", "update") if part in parts and part in held]
        if again:
            yield Problem(
                RULES,
                f"the ratio would be counted twice: {held[again[0]]} contains its {' and '.join(again)} part already",
                got=f"{rule.name} weighs by ratio={rule.ratio}, beside {held[again[0]]}",
                expected="each part of the ratio to the rollout once",
                fix="use a rule that only rejects, such as trm_max, a rule on another ratio, or a loss without it",
            )
        held |= dict.fromkeys(parts, f"rule {rule.name}")
