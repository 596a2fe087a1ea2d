"""Rules between settings: combinations that cannot work are refused, settings without effect are told.

Each subject has a file of its own; this one asks them all, after every `auto` has become a value (`choices.py`).
Only values are looked at here, never files or devices: those are checked where they are opened.
A rule that needs the model or an installed version is in the learner's own check.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from moe_trm.config import (
    advantage_rules,
    agent_rules,
    anti_patterns,
    correction_rules,
    deepspeed_rules,
    engine_rules,
    exact_rules,
    lora_rules,
    picture_rules,
    precision_rules,
    rollout_rules,
    schedule_rules,
    task_rules,
    training_rules,
)
from moe_trm.config.choices import Choice, settle
from moe_trm.config.idle_settings import idle_settings
from moe_trm.config.problems import Problem
from moe_trm.config.rollout_rules import MASK_LIMIT
from moe_trm.config.schema import Config, ObserveConfig, RolloutConfig


def refusals(config: Config) -> list[Problem]:
    """The reasons that this configuration cannot work; empty when it can.

    An engine that is not known is taken for the default one in the rest.
    """
    unknown = [*engine_rules.unknown(config.rollout)]
    if unknown:
        rollout = config.rollout.model_copy(update={"engine": RolloutConfig().engine})
        config = config.model_copy(update={"rollout": rollout})
    config, choices = settle(config)
    return [*unknown, *explained(_refusals(config), choices)]


def explained(problems: Sequence[Problem], choices: Sequence[Choice]) -> list[Problem]:
    """The problems; where `auto` chose the setting, with the choice and its reason."""
    reasons = {choice.key: f" ({choice})" for choice in choices}
    return [replace(problem, got=problem.got + reasons.get(problem.key, "")) for problem in problems]


def _refusals(config: Config) -> list[Problem]:
    engines = config.rollout, config.learner, config.replay, config.pipeline
    return [
        *agent_rules.refusals(config),
        *engine_rules.refusals(config),
        *rollout_rules.refusals(config),
        *schedule_rules.refusals(config),
        *task_rules.refusals(config.task, config.rollout, config.train, config.eval),
        *training_rules.refusals(config),
        *correction_rules.refusals(
            config.correction,
            config.loss,
            recovery=config.pipeline.recovery,
            replay_mode=config.replay.mode,
            rollout=config.rollout,
            keeps_masks=config.keeps_masks,
        ),
        *advantage_rules.refusals(config.advantage, config.keeps_masks, config.kl, config.pipeline, config.batch),
        *precision_rules.refusals(config.rollout, config.sync, config.learner, config.batch),
        *deepspeed_rules.refusals(config.learner, config.optimizer),
        *lora_rules.refusals(config.learner),
        *picture_rules.refusals(config),
        *(exact_rules.refusals(*engines, keeps_masks=config.keeps_masks) if config.exact else ()),
        *_observe(config.observe),
    ]


def warnings(config: Config) -> list[str]:
    """Settings that were written down but change nothing, and combinations that do not do what they seem to."""
    config, _ = settle(config)
    return [
        *idle_settings(config),
        *deepspeed_rules.idle_settings(config.learner),
        *lora_rules.idle_settings(config.learner),
        *picture_rules.idle_settings(config.learner, has_pictures=config.task.has_pictures),
        *precision_rules.surprises(config.learner, config.rollout, config.replay, config.probe, config.correction),
        *lora_rules.surprises(config.learner, config.rollout, config.probe),
        *(f"anti-pattern, {row}" for row in anti_patterns.planned(config) if not row.refused),
        *_surprises(config),
    ]


def _observe(observe: ObserveConfig) -> Iterator[Problem]:
    sinks = observe.sinks
    for name in sorted({name for name in sinks if sinks.count(name) > 1}):
        yield Problem("observe.sinks", f"{name} is listed more than once", got=str(sinks.count(name)), expected="once")


def _surprises(config: Config) -> Iterator[str]:
    rollout = config.rollout
    if config.record.bundle and not config.pipeline.scores_fit:
        yield (
            "record.bundle keeps the rollouts of this run, but not what its updates saw: a recording has no place for "
            "the averaged anchor of pipeline.proximal=average"
        )
    if config.sampling_mask.mode == "keep" and not rollout.truncates:
        yield (
            "sampling_mask.mode=keep records every id of the vocabulary, with its log-prob, for every token (at most "
            f"{MASK_LIMIT}): nothing is truncated (top_p 1, min_p 0, no top_k)"
        )
    if config.sampling_mask.mode == "off" and rollout.truncates:
        yield (
            "sampling_mask.mode=off with truncated sampling: the learner scores ids that the rollout could not sample, "
            "and the difference stays in the engine ratio"
        )
    if config.replay.mode == "R2" and config.learner.minibatches * config.learner.epochs == 1:
        yield (
            "replay.mode=R2 changes little with learner.minibatches=1: there is no second update to hold the routes for"
        )
    if config.kl.coef > 0 and config.kl.where == "loss" and config.kl.estimator == "k1":
        yield "kl.estimator=k1 in the loss has a mean gradient of zero on-policy: take k2, k3+ or kl.where=reward"
    if config.task.shuffle_rewards:
        yield "task.shuffle_rewards=true: a control experiment, nothing can be learnt"
    if not config.task.has_evaluation:
        yield "no evaluation: task.eval_prompts is not set"
