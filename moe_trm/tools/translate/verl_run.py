"""The rest of a verl run in our settings: its length, checkpoints, evaluation, reward and trackers."""

from __future__ import annotations

from collections.abc import Sequence

from moe_trm.tools.translate.draft import Draft
from moe_trm.tools.translate.foreign_setting import NeedsDecisionError
from moe_trm.tools.translate.values import Rule, integer, number, switch, text
from moe_trm.tools.translate.verl_keys import ROLLOUT

TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")
"""Experiment trackers that have the same name everywhere."""

_VALIDATION = f"{ROLLOUT}.val_kwargs"


def _length(draft: Draft) -> None:
    steps = integer(draft, "trainer.total_training_steps")
    if steps is not None:
        draft.put("train.steps", steps, "trainer.total_training_steps")
        draft.miss("trainer.total_epochs", "verl does not read it with total_training_steps")
        return
    draft.miss("trainer.total_training_steps", "null: verl counts epochs")
    epochs = integer(draft, "trainer.total_epochs")
    raise NeedsDecisionError(
        "trainer.total_epochs", f"runs are counted in steps here: {epochs} * prompts // rollout.prompts_per_step"
    )


def _saving(draft: Draft) -> None:
    key = "trainer.save_freq"
    interval = integer(draft, key) or 0
    draft.put("checkpoint.every", max(interval, 0), key)


def _resuming(draft: Draft) -> None:
    key = "trainer.resume_mode"
    mode = text(draft, key)
    if mode == "disable":
        draft.put("checkpoint.resume", "never", key)
    elif mode in ("auto", None):
        draft.put("checkpoint.resume", "auto", key)
    else:
        raise NeedsDecisionError(key, f"{mode}: checkpoints of verl cannot be read; export the weights first")


def _tracking(draft: Draft) -> None:
    key = "trainer.logger"
    value = draft.take(key)
    if value is None:
        return
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise NeedsDecisionError(key, f"a list of names is expected, not {value}")
    trackers = [name for name in names if name in TRACKERS]
    unknown_trackers = [name for name in names if name not in (*TRACKERS, "console", "file")]
    draft.put("observe.sinks", trackers, key)
    if unknown_trackers:
        draft.decide(key, f"{', '.join(unknown_trackers)}: trackers here are {', '.join(TRACKERS)}")


def _evaluating(draft: Draft) -> None:
    """verl samples `n` answers to each held-out prompt; one answer at temperature 0 is our greedy evaluation."""
    names = ("n", "temperature", "do_sample", "top_p")
    keys = {name: f"{_VALIDATION}.{name}" for name in names}
    samples, temperature = integer(draft, keys["n"]) or 1, number(draft, keys["temperature"]) or 0
    if switch(draft, keys["do_sample"]) and temperature > 0:
        draft.put("eval.samples", samples, keys["n"], keys["do_sample"])
        draft.put("eval.temperature", temperature, keys["temperature"])
        draft.put("eval.top_p", number(draft, keys["top_p"]), keys["top_p"])
    else:
        draft.put("eval.samples", 0, keys["n"], keys["do_sample"])
        for name in ("temperature", "top_p"):
            draft.miss(keys[name], "verl's evaluation is greedy, as ours is without eval.samples")
    if (integer(draft, f"{_VALIDATION}.top_k") or -1) > 0:
        draft.miss(f"{_VALIDATION}.top_k", "sampled answers of an evaluation have no top_k here")


def _evaluated(draft: Draft) -> None:
    interval = integer(draft, "trainer.test_freq")
    if interval is not None:
        draft.put("train.eval_every", max(interval, 0), "trainer.test_freq")
    if draft.take("trainer.val_before_train") is not None:
        same = switch(draft, "trainer.val_before_train")
        reason = "always so here" if same else "the start is always evaluated here"
        draft.miss("trainer.val_before_train", reason)


def _all_prompts(draft: Draft) -> None:
    key = "data.val_max_samples"
    value = integer(draft, key)
    if value is not None and value > 0:
        draft.put("task.eval_size", value, key)
    elif draft.take("data.val_files") is not None:
        draft.remark("verl evaluates on all held-out prompts; here on the first task.eval_size of them")


def _reward(draft: Draft) -> None:
    """A function of verl's takes other arguments, and verl's own scoring goes by `data_source`."""
    places = ("reward.custom_reward_function", "custom_reward_function")
    for place in places:
        path, name = text(draft, f"{place}.path"), text(draft, f"{place}.name")
        if path:
            raise NeedsDecisionError(
                f"{place}.path",
                f"{path}:{name or 'compute_score'} takes other arguments: write it as in docs/tasks.md",
            )
        for key in (f"{place}.path", f"{place}.name"):
            draft.miss(key, "null: verl scores by itself")
    raise NeedsDecisionError(
        "data.train_files",
        "verl scores answers by the data's data_source, and keeps them in reward_model.ground_truth: "
        "name a reward and the answer's field (docs/tasks.md)",
    )


def _default_dir(draft: Draft) -> None:
    value = text(draft, "trainer.default_local_dir")
    if value is not None:
        draft.put("checkpoint.dir", value, "trainer.default_local_dir")


def _ranks(draft: Draft) -> None:
    for key in ("trainer.nnodes", "trainer.n_gpus_per_node"):
        draft.miss(key, "not a setting here: `moe-trm train --nproc-per-node`, several nodes: launch/slurm.sh")


RUN: Sequence[Rule] = (
    Rule(("trainer.total_training_steps", "trainer.total_epochs"), ("train.steps",), _length),
    Rule(("trainer.test_freq", "trainer.val_before_train"), ("train.eval_every",), _evaluated),
    Rule(("trainer.save_freq",), ("checkpoint.every",), _saving),
    Rule(("trainer.default_local_dir",), ("checkpoint.dir",), _default_dir),
    Rule(("trainer.resume_mode",), ("checkpoint.resume",), _resuming),
    Rule(("trainer.logger",), ("observe.sinks",), _tracking),
    Rule(
        tuple(f"{_VALIDATION}.{name}" for name in ("n", "temperature", "do_sample", "top_p", "top_k")),
        ("eval.samples", "eval.temperature", "eval.top_p"),
        _evaluating,
    ),
    Rule(("data.val_max_samples",), ("task.eval_size",), _all_prompts),
    Rule(
        tuple(
            f"{place}.{name}"
            for place in ("reward.custom_reward_function", "custom_reward_function")
            for name in ("path", "name")
        ),
        ("task.reward",),
        _reward,
    ),
    Rule(("trainer.nnodes", "trainer.n_gpus_per_node"), (), _ranks),
)
