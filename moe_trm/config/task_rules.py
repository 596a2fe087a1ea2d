"""Rules between settings of prompts, rewards and evaluation. See `moe_trm.config.rules`."""

from __future__ import annotations

import re
from collections.abc import Iterator

from moe_trm.config.problems import Problem
from moe_trm.config.schema import EvalConfig, RolloutConfig, TaskConfig, TrainConfig


def refusals(task: TaskConfig, rollout: RolloutConfig, train: TrainConfig, evaluation: EvalConfig) -> list[Problem]:
    """The reasons that these settings cannot work; empty when they can."""
    return [*_task(task, rollout, train), *_evaluation(evaluation, task, rollout)]


def _task(task: TaskConfig, rollout: RolloutConfig, train: TrainConfig) -> Iterator[Problem]:
    agent = rollout.agent
    if task.reads_prompts and not task.prompts:
        yield Problem(
            "task.prompts",
            f"task {task.name} reads its prompts from a file",
            got="none",
            expected="a JSONL or parquet file, or hf:NAME",
        )
    for key, name, words in (
        ("task.reward", task.reward, "exact, math_verify, "),
        ("rollout.function", rollout.function, ""),
        ("rollout.agent", agent if isinstance(agent, str) else None, "a list (a command line), "),
    ):
        if name is not None and name not in ("exact", "math_verify") and not _names_a_function(name):
            yield Problem(
                key,
                "this names no function",
                got=name,
                expected=f"{words}package.module:function or path/to/file.py:function",
            )
    if isinstance(agent, tuple) and not (agent and all(agent)):
        yield Problem(
            "rollout.agent",
            "this is no command line",
            got=str(list(agent)),
            expected="a program and its arguments, e.g. [python, my_agent.py]",
        )
    if rollout.function is not None and agent is not None:
        yield Problem(
            "rollout.agent",
            "a sample is made by a rollout function or by an agent",
            got=f"{agent} and rollout.function={rollout.function}",
            expected="one of the two keys",
        )
    if task.template is not None and "{prompt}" not in task.template:
        yield Problem(
            "task.template",
            "the template leaves the prompt out",
            got=repr(task.template),
            expected="a text with {prompt} in it",
        )
    if train.eval_every and not task.has_evaluation:
        yield Problem(
            "train.eval_every",
            "there is nothing to evaluate on",
            got=str(train.eval_every),
            expected="0",
            fix="set task.eval_prompts" if task.reads_prompts else "set task.eval_size above 0",
        )


def _names_a_function(name: str) -> bool:
    place, mark, function = name.rpartition(":")
    return bool(mark and place) and function.isidentifier()


def _evaluation(evaluation: EvalConfig, task: TaskConfig, rollout: RolloutConfig) -> Iterator[Problem]:
    settings = evaluation
    for name in task.eval_sets:
        if not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
            yield Problem(
                "task.eval_sets",
                "a set's name becomes part of the names of its metrics",
                got=repr(name),
                expected="letters, digits, dots, dashes and underscores",
            )
    metrics = evaluation_metrics(evaluation, task, rollout)
    if settings.keep_best and settings.best_metric is not None and settings.best_metric not in metrics:
        yield Problem(
            "eval.best_metric",
            "no evaluation measures this",
            got=settings.best_metric,
            expected=", ".join(metrics),
            fix="set eval.samples to the k of avg_at_k and pass_at_k" if "_at_" in settings.best_metric else "",
        )


def evaluation_metrics(evaluation: EvalConfig, task: TaskConfig, rollout: RolloutConfig) -> list[str]:
    """Metrics of an evaluation of which more is better. Rewards that are not 0 or 1 have no `pass_at_k`."""
    k = evaluation.samples
    sets = ["eval/", *(f"eval/{name}/" for name in task.eval_sets)]
    metrics = [
        greedy_metric(task, rollout),
        "finished_fraction",
        *((f"avg_at_{k}", f"pass_at_{k}", f"best_at_{k}") if k else ()),
    ]
    return [f"{prefix}{metric}" for prefix in sets for metric in metrics]


def greedy_metric(task: TaskConfig, rollout: RolloutConfig) -> str:
    """Name of the mean reward of greedy answers: a share of right ones only where a reward says right or wrong.

    A rollout function or an agent may give a reward of its own, unless `task.reward` says which one counts.
    """
    has_other_reward = rollout.has_turns and task.reward is None
    return "accuracy" if task.right_or_wrong and not has_other_reward else "reward"


def best_metric(evaluation: EvalConfig, task: TaskConfig, rollout: RolloutConfig) -> str:
    """The metric whose highest value is the best evaluation."""
    return evaluation.best_metric or f"eval/{greedy_metric(task, rollout)}"
