"""Rules between settings, in one place: combinations that cannot work are refused, settings without effect are told.

Only values are looked at here, never files or devices: those are checked by whoever opens them.
"""

from __future__ import annotations

from collections.abc import Iterator

from moe_trm.config import deepspeed_rules, precision_rules, training_rules
from moe_trm.config.problems import Problem
from moe_trm.config.schema import Config, RuleConfig

MASK_LIMIT = 4096
"""Kept ids per position that the rollout engine can return (SGLang's `--sampling-mask-max-tokens` default)."""

PROJECTS = {"wandb", "mlflow", "trackio"}
"""Trackers that file runs under a project."""


def refusals(config: Config) -> list[Problem]:
    """Why this configuration cannot work; empty when it can."""
    return [
        *_rollout(config),
        *_task(config),
        *_batch(config),
        *_pipeline(config),
        *training_rules.refusals(config),
        *precision_rules.refusals(config),
        *_observe(config),
        *_bypass(config),
        *_parallel(config),
        *deepspeed_rules.refusals(config),
    ]


def warnings(config: Config) -> list[str]:
    """Settings that were written down but change nothing, and combinations that do not do what they seem to."""
    return [
        *_idle_settings(config),
        *deepspeed_rules.idle_settings(config),
        *precision_rules.surprises(config),
        *_surprises(config),
    ]


def _rollout(config: Config) -> Iterator[Problem]:
    rollout = config.rollout
    if rollout.engine == "bundle" and not rollout.bundle:
        yield Problem(
            "rollout.bundle",
            "rollout.engine=bundle repeats a recorded run and needs its folder",
            got="none",
            expected="a folder that a run with record.bundle wrote",
        )
    if rollout.engine == "bundle" and rollout.bundle and rollout.bundle == config.record.bundle:
        yield Problem(
            "record.bundle",
            "a run cannot record into the bundle it reads",
            got=rollout.bundle,
            expected="another folder or none",
        )
    if rollout.url and rollout.urls:
        yield Problem(
            "rollout.urls",
            "one server and several cannot both be meant",
            got=rollout.url,
            expected="one of the two keys",
        )
    if rollout.router and not rollout.attached:
        yield Problem(
            "rollout.router",
            "a router hands samples on, but weights have to be pushed to each server",
            got=f"{rollout.router} without rollout.urls",
            expected="the servers' own addresses in rollout.urls",
        )
    if rollout.router and rollout.router.rstrip("/") in [url.rstrip("/") for url in rollout.addresses]:
        yield Problem(
            "rollout.router",
            "a router is no rollout server: what is pushed to it would reach one of them",
            got=f"{rollout.router} in rollout.urls too",
            expected="the servers' own addresses in rollout.urls",
        )
    if len(rollout.urls) > 1 and config.sync.method == "distributed":
        yield Problem(
            "sync.method",
            "a broadcast reaches one rollout server",
            got=f"distributed with {len(rollout.urls)} rollout.urls",
            expected="disk, on storage that all servers see",
        )
    if config.sampling_mask.mode == "keep" and rollout.top_k is not None and rollout.top_k > MASK_LIMIT:
        yield Problem(
            "rollout.top_k",
            "the engine returns no more kept ids than its limit, so the mask would be incomplete",
            got=str(rollout.top_k),
            expected=f"at most {MASK_LIMIT}",
            fix="lower rollout.top_k or set sampling_mask.mode=off",
        )
    if rollout.top_k == 1:
        yield Problem(
            "rollout.top_k",
            "one kept id is greedy decoding: nothing is sampled, and the engine's log-probs ignore the temperature",
            got="1",
            expected="none, or at least 2",
        )


def _observe(config: Config) -> Iterator[Problem]:
    sinks = config.observe.sinks
    for name in sorted({name for name in sinks if sinks.count(name) > 1}):
        yield Problem("observe.sinks", f"{name} is listed more than once", got=str(sinks.count(name)), expected="once")


def _task(config: Config) -> Iterator[Problem]:
    task = config.task
    if task.name != "arithmetic" and not task.prompts:
        yield Problem(
            "task.prompts",
            f"task {task.name} reads its prompts from a file",
            got="none",
            expected="a JSONL or parquet file, or hf:NAME",
        )
    for key, name, words in (
        ("task.reward", task.reward, "exact, math_verify, "),
        ("rollout.function", config.rollout.function, ""),
    ):
        if name is not None and name not in ("exact", "math_verify") and not _names_a_function(name):
            yield Problem(
                key,
                "this names no function",
                got=name,
                expected=f"{words}package.module:function or path/to/file.py:function",
            )
    if task.template is not None and "{prompt}" not in task.template:
        yield Problem(
            "task.template",
            "the template leaves the prompt out",
            got=repr(task.template),
            expected="a text with {prompt} in it",
        )
    if config.train.eval_every and not has_evaluation(config):
        yield Problem(
            "train.eval_every",
            "there is nothing to evaluate on",
            got=str(config.train.eval_every),
            expected="0",
            fix="set task.eval_prompts" if task.name != "arithmetic" else "set task.eval_size above 0",
        )


def _names_a_function(name: str) -> bool:
    place, mark, function = name.rpartition(":")
    return bool(mark and place) and function.isidentifier()


def has_evaluation(config: Config) -> bool:
    """Whether the task has held-out prompts."""
    task = config.task
    return task.eval_size > 0 and (task.name == "arithmetic" or bool(task.eval_prompts or task.eval_sets))


def _batch(config: Config) -> Iterator[Problem]:
    rows, parts = config.rollout.prompts_per_step * config.rollout.group_size, config.learner.minibatches
    if rows % parts:
        yield Problem(
            "learner.minibatches",
            "a step's sequences must split evenly",
            got=f"{rows} sequences (rollout.prompts_per_step * rollout.group_size) in {parts} minibatches",
            expected=f"a divisor of {rows}",
        )
    learner = config.learner
    if learner.micro_batch_rows is not None and learner.micro_batch_tokens is not None:
        yield Problem(
            "learner.micro_batch_tokens",
            "micro-batches are cut by rows or by tokens",
            got=f"micro_batch_rows={learner.micro_batch_rows} and micro_batch_tokens={learner.micro_batch_tokens}",
            expected="one of the two",
            fix="set learner.micro_batch_rows=null",
        )
    if learner.micro_batch_tokens is not None and learner.micro_batch_tokens < config.rollout.max_new_tokens:
        yield Problem(
            "learner.micro_batch_tokens",
            "one answer may be longer than a micro-batch",
            got=f"{learner.micro_batch_tokens} tokens with rollout.max_new_tokens={config.rollout.max_new_tokens}",
            expected="at least the longest prompt and answer together",
        )
    if config.rollout.group_size == 1 and config.advantage.name != "reinforce_plus_plus":
        yield Problem(
            "rollout.group_size",
            f"advantage.name={config.advantage.name} compares the samples of one prompt; with one sample there is no baseline",
            got="1",
            expected="at least 2",
            fix="raise rollout.group_size, or set advantage.name=reinforce_plus_plus, whose baseline is the batch",
        )
    if config.rollout.group_size == 1 and config.batch.zero_variance == "drop":
        yield Problem(
            "batch.zero_variance",
            "one sample per prompt has no variance: every group would be dropped",
            got="drop with rollout.group_size=1",
            expected="keep, or rollout.group_size of at least 2",
        )
    for rule in config.correction.rules:
        yield from _exact_divergence(config, rule)
    names = [rule.name for rule in config.correction.rules]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield Problem(
            "correction.rules",
            f"rule {name} is listed more than once, and its metrics would overwrite each other",
            got=str(names.count(name)),
            expected="once",
        )


def _pipeline(config: Config) -> Iterator[Problem]:
    pipeline = config.pipeline
    if config.rollout.colocate and pipeline.mode != "sync":
        yield Problem(
            "rollout.colocate",
            "an engine that lends its memory to the learner cannot sample meanwhile",
            got=f"true with pipeline.mode={pipeline.mode}",
            expected="pipeline.mode=sync",
            fix="give the engine GPUs of its own, or train synchronously",
        )
    given, fixed = pipeline.max_staleness, {"sync": 0, "one_step": 1}.get(pipeline.mode)
    if given is not None and fixed is not None and given != fixed:
        yield Problem(
            "pipeline.max_staleness",
            f"pipeline.mode={pipeline.mode} fixes the age of its samples",
            got=str(given),
            expected=f"none, or {fixed}",
            fix="leave it out, or set pipeline.mode=async",
        )
    if pipeline.recovery in ("interpolate", "bypass") and config.replay.mode == "R2":
        yield Problem(
            "pipeline.behavior",
            "R2 replays the routes of the anchor pass, which is left out",
            got=f"{pipeline.behavior} with replay.mode=R2",
            expected="snapshot or merged, or replay.mode=R3",
        )
    if pipeline.partial == "interrupt" and config.sync.method == "distributed":
        yield Problem(
            "pipeline.partial",
            "the ranks that broadcast wait for the engine, so there is nothing to gain from interrupting",
            got="interrupt with sync.method=distributed",
            expected="wait, or sync.method=disk",
        )


def _bypass(config: Config) -> Iterator[Problem]:
    preset = config.correction.preset or ""
    if preset.startswith("bypass_") and config.replay.mode == "R2":
        yield Problem(
            "replay.mode",
            "R2 replays the routes of the proximal pass, which plays no part in bypass mode",
            got=f"R2 with correction.preset={preset}",
            expected="R3 or none",
        )


def _exact_divergence(config: Config, rule: RuleConfig) -> Iterator[Problem]:
    if rule.thresholds.get("divergence") != "exact":
        return
    if config.sampling_mask.mode == "off":
        yield Problem(
            "sampling_mask.mode",
            f"rule {rule.name} with divergence=exact needs the rollout's distribution, which is recorded with the sampling mask",
            got="off",
            expected="keep",
            fix="set sampling_mask.mode=keep, or divergence=sampled",
        )
    if rule.thresholds.get("ratio", "total") != "total":
        yield Problem(
            "correction.rules",
            f"rule {rule.name} with divergence=exact compares the rollout with the current policy, which is the total ratio",
            got=f"ratio={rule.thresholds['ratio']}",
            expected="ratio left out",
        )


def _parallel(config: Config) -> Iterator[Problem]:
    parallel = config.learner.parallel
    if parallel.virtual_pipeline is not None and parallel.virtual_pipeline > 1 and parallel.pipeline == 1:
        yield Problem(
            "learner.parallel.virtual_pipeline",
            "model chunks need a pipeline",
            got=f"{parallel.virtual_pipeline} chunks on 1 stage",
            expected="learner.parallel.pipeline of at least 2",
        )
    if parallel.tensor > 1 and parallel.expert_tensor == 1 and parallel.expert == 1:
        yield Problem(
            "learner.parallel.tensor",
            "tensor parallelism with whole experts on every rank trains wrongly on Megatron-Core before 0.17",
            got=f"tensor {parallel.tensor}, expert_tensor 1, expert 1",
            expected=f"expert_tensor={parallel.tensor} or expert={parallel.tensor}",
        )


def _idle_settings(config: Config) -> Iterator[str]:
    """Keys that were set while another setting makes them idle."""
    rollout, task = config.rollout, config.task
    exact = task.reward == "exact" or (task.reward is None and task.name != "gsm8k")
    plain_reward = exact or task.reward in (None, "math_verify")
    idle = [
        ("rollout", "colocate", rollout.engine == "bundle", "rollout.engine=bundle holds no memory"),
        *(
            ("pipeline", key, config.pipeline.staleness_limit == 0, "no sample is older than the learner's weights")
            for key in ("behavior", "snapshot_gib")
        ),
        ("pipeline", "partial", config.pipeline.mode == "sync", "nothing is sampled while pipeline.mode=sync pushes"),
        ("pipeline", "partial", rollout.engine == "bundle", "a recording is never interrupted"),
        ("rollout", "bundle_delay_s", rollout.engine == "sglang", "rollout.engine=sglang samples anew"),
        ("rollout", "urls", rollout.engine == "bundle", "rollout.engine=bundle reads a recording"),
        ("rollout", "url", rollout.engine == "bundle", "rollout.engine=bundle reads a recording"),
        ("rollout", "router", rollout.engine == "bundle", "rollout.engine=bundle reads a recording"),
        ("rollout", "bundle", rollout.engine == "sglang", "rollout.engine=sglang samples anew"),
        ("replay", "max_local_flip_rate", config.replay.mode == "none", "replay.mode=none replays nothing"),
        ("probe", "save", config.probe.save and config.probe.every == 0, "probe.every=0 probes nothing"),
        ("sampling_mask", "violation", config.sampling_mask.mode == "off", "sampling_mask.mode=off records no masks"),
        ("task", "max_digits", task.name != "arithmetic", f"task.name={task.name} reads its prompts from a file"),
        ("task", "prompts", task.name == "arithmetic", "task.name=arithmetic makes its own prompts"),
        ("task", "eval_prompts", task.name == "arithmetic", "task.name=arithmetic makes its own prompts"),
        ("task", "template", task.name == "arithmetic", "task.name=arithmetic makes its own prompts"),
        ("task", "eval_sets", task.name == "arithmetic", "task.name=arithmetic makes its own prompts"),
        ("train", "eval_every", rollout.engine == "bundle", "a recorded run has no weights to evaluate"),
        *(
            ("eval", key, config.eval.samples == 0, "eval.samples=0 samples nothing")
            for key in ("temperature", "top_p")
        ),
        *(
            ("eval", key, not has_evaluation(config) or rollout.engine == "bundle", "nothing is evaluated")
            for key in ("samples", "max_new_tokens", "keep_best", "best_metric")
        ),
        ("task", "chat", task.name == "arithmetic", "task.name=arithmetic makes its own prompts"),
        ("task", "prompt_field", task.name != "jsonl", f"task.name={task.name} knows its fields"),
        ("task", "answer_field", task.name != "jsonl", f"task.name={task.name} knows its fields"),
        ("task", "reward_weights", plain_reward and rollout.function is None, "the reward is one number"),
        ("task", "reward_timeout_s", exact, "task.reward=exact takes no time"),
        ("task", "reward_processes", exact, "task.reward=exact needs none"),
        *(
            ("rollout", key, rollout.function is None, "rollout.function is not set: every sample is one answer")
            for key in ("function_timeout_s", "max_turns", "max_tokens")
        ),
        ("observe", "project", not set(config.observe.sinks) & PROJECTS, "no tracker of observe.sinks has projects"),
        ("observe", "transcript_rollouts", config.observe.transcripts == 0, "observe.transcripts=0 writes none"),
        ("sync", "verify", rollout.engine == "bundle", "rollout.engine=bundle serves no weights"),
        ("sync", "method", rollout.engine == "bundle", "rollout.engine=bundle serves no weights"),
        ("sync", "dir", config.sync.method == "distributed", "sync.method=distributed writes no files"),
        *(("kl", key, config.kl.coef == 0, "kl.coef=0 keeps no reference") for key in ("estimator", "where")),
        *(("kl", key, config.kl.controller == "fixed", "kl.controller=fixed") for key in ("target", "horizon")),
        (
            "loss",
            "measure_entropy",
            config.loss.entropy_coef > 0 or config.loss.name == "espo",
            "the loss needs the entropy anyway",
        ),
        *(
            ("optimizer", key, config.optimizer.schedule == "constant", "optimizer.schedule=constant")
            for key in ("min_lr", "decay_steps")
        ),
        (
            "optimizer",
            "final_steps",
            config.optimizer.schedule != "wsd",
            "only optimizer.schedule=wsd has a final part",
        ),
        ("optimizer", "surge_window", config.optimizer.surge_limit is None, "optimizer.surge_limit is not set"),
        ("optimizer", "warmup_steps", config.optimizer.lr == 0, "optimizer.lr=0 trains nothing"),
        (
            "batch",
            "refill_limit",
            config.batch.zero_variance == "keep" and config.batch.overlong != "drop",
            "nothing is dropped, so nothing is refilled",
        ),
        (
            "advantage",
            "normalize_std",
            config.advantage.name not in ("grpo", "pass_at_k"),
            f"advantage.name={config.advantage.name} has no such choice",
        ),
        (
            "correction",
            "calibration_steps",
            all(rule.target_reject_rate is None for rule in config.correction.rules),
            "no rule has a target_reject_rate",
        ),
    ]
    for section, key, idle_now, reason in idle:
        if idle_now and key in getattr(config, section).model_fields_set:
            yield f"{section}.{key} has no effect: {reason}"
    # The dtype of an attached server still matters: weights are pushed in it.
    started = rollout.server.model_fields_set - {"dtype"}
    if started and (rollout.attached or rollout.engine == "bundle"):
        reason = (
            f"rollout.url={', '.join(rollout.addresses)} points at a running server"
            if rollout.attached
            else "rollout.engine=bundle starts no server"
        )
        yield f"{', '.join(f'rollout.server.{key}' for key in sorted(started))} has no effect: {reason}"


def _surprises(config: Config) -> Iterator[str]:
    rollout = config.rollout
    if config.record.bundle and config.pipeline.recovery != "same":
        yield "record.bundle keeps the rollouts of this run, but not what its updates saw: that is recorded without stale samples only (pipeline.mode=sync)"
    truncates = rollout.top_p < 1 or rollout.min_p > 0 or rollout.top_k is not None
    if config.sampling_mask.mode == "keep" and not truncates and "mode" in config.sampling_mask.model_fields_set:
        yield f"sampling_mask.mode=keep changes little: nothing is truncated (top_p 1, min_p 0, no top_k) unless the vocabulary exceeds {MASK_LIMIT} ids"
    if config.sampling_mask.mode == "off" and truncates:
        yield "sampling_mask.mode=off with truncated sampling: the learner scores ids that the rollout could not sample, and the difference stays in the engine ratio"
    if config.replay.mode == "R2" and config.learner.minibatches * config.learner.epochs == 1:
        yield "replay.mode=R2 changes little with learner.minibatches=1: there is no second update to hold the routes for"
    if config.kl.coef > 0 and config.kl.where == "loss" and config.kl.estimator == "k1":
        yield "kl.estimator=k1 in the loss has a mean gradient of zero on-policy: take k2, k3+ or kl.where=reward"
    if config.task.shuffle_rewards:
        yield "task.shuffle_rewards=true: a control experiment, nothing can be learnt"
    if not has_evaluation(config):
        yield "no evaluation: task.eval_prompts is not set"
