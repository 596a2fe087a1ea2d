"""Rules between settings of the objective, the optimizer and the evaluation. See `moe_trm.config.rules`."""

from __future__ import annotations

import re
from collections.abc import Iterator

from moe_trm.config.problems import Problem
from moe_trm.config.schema import Config
from moe_trm.schedule import learning_rate


def refusals(config: Config) -> list[Problem]:
    """Why these settings cannot work; empty when they can."""
    return [*_kl(config), *_optimizer(config), *_evaluation(config)]


def _kl(config: Config) -> Iterator[Problem]:
    kl = config.kl
    if kl.controller == "adaptive" and kl.coef == 0:
        yield Problem(
            "kl.coef",
            "an adaptive coefficient grows from where it starts",
            got="0 with kl.controller=adaptive",
            expected="a positive number, e.g. 0.001",
        )
    if kl.coef and kl.where == "reward" and config.advantage.name == "gdpo":
        yield Problem(
            "kl.where",
            "gdpo compares named rewards one by one, and the KL lowers their sum",
            got="reward with advantage.name=gdpo",
            expected="loss",
        )
    if kl.where == "reward" and kl.estimator == "k3_is":
        yield Problem(
            "kl.estimator",
            "k3_is differs from k3 by its gradient, which a reward does not have",
            got="k3_is with kl.where=reward",
            expected="k1, k2, k3 or abs",
        )


def _optimizer(config: Config) -> Iterator[Problem]:
    optimizer, rate = config.optimizer, learning_rate(config)
    if optimizer.min_lr > optimizer.lr:
        yield Problem(
            "optimizer.min_lr",
            "the schedule goes down",
            got=f"{optimizer.min_lr} above optimizer.lr={optimizer.lr}",
            expected="at most optimizer.lr",
        )
    if optimizer.schedule != "constant" and rate.num_steps <= optimizer.warmup_steps:
        yield Problem(
            "optimizer.warmup_steps",
            "warm-up takes as long as the whole schedule",
            got=f"{optimizer.warmup_steps} of {rate.num_steps} optimizer steps",
            expected=f"less than {rate.num_steps}",
            fix="lower optimizer.warmup_steps, or set optimizer.decay_steps",
        )
    elif optimizer.schedule == "wsd" and rate.final_steps > rate.num_steps - optimizer.warmup_steps:
        yield Problem(
            "optimizer.final_steps",
            "the way down does not fit after warm-up",
            got=f"{rate.final_steps} of {rate.num_steps} optimizer steps, {optimizer.warmup_steps} of them warm-up",
            expected=f"at most {rate.num_steps - optimizer.warmup_steps}",
        )
    if optimizer.ess_scale != "off" and config.pipeline.recovery in ("interpolate", "bypass"):
        yield Problem(
            "optimizer.ess_scale",
            "the ratio of policy to rollout is not known before the update",
            got=f"{optimizer.ess_scale} with pipeline.behavior={config.pipeline.recovery}",
            expected="pipeline.behavior=snapshot or merged",
        )
    for index, group in enumerate(optimizer.groups):
        try:
            re.compile(group.match)
        except re.error as error:
            yield Problem(
                f"optimizer.groups.{index}.match",
                f"not a regular expression: {error}",
                got=group.match,
                expected="one that Python's `re` accepts",
            )


def _evaluation(config: Config) -> Iterator[Problem]:
    settings, k = config.eval, config.eval.samples
    for name in config.task.eval_sets:
        if not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
            yield Problem(
                "task.eval_sets",
                "a set's name becomes part of the names of its metrics",
                got=repr(name),
                expected="letters, digits, dots, dashes and underscores",
            )
    sets = ["eval/", *(f"eval/{name}/" for name in config.task.eval_sets)]
    metrics = ["accuracy", "finished_fraction", *((f"avg_at_{k}", f"pass_at_{k}") if k else ())]
    known = [f"{prefix}{metric}" for prefix in sets for metric in metrics]
    if settings.keep_best and settings.best_metric not in known:
        yield Problem(
            "eval.best_metric",
            "no evaluation measures this",
            got=settings.best_metric,
            expected=", ".join(known),
            fix="set eval.samples to the k of avg_at_k and pass_at_k" if "_at_" in settings.best_metric else "",
        )
