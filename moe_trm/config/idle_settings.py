"""Settings that were written down while another one makes them idle: a table of key, condition and reason."""

from __future__ import annotations

from collections.abc import Iterator

from moe_trm.config import schedule_rules
from moe_trm.config.schema import Config
from moe_trm.methods.advantages import ADVANTAGES
from moe_trm.methods.losses import needs
from moe_trm.runtime.addresses import in_the_clear

PROJECTS = {"wandb", "mlflow", "trackio"}
"""Trackers that file runs under a project."""


def idle_settings(config: Config) -> Iterator[str]:
    """Keys that were set while another setting makes them idle. A row of the table has one key, or several."""
    rollout, task = config.rollout, config.task
    engine, traits = f"rollout.engine={rollout.engine}", rollout.traits
    advantage = ADVANTAGES[config.advantage.name]
    no_choice = f"advantage.name={config.advantage.name} has no such choice"
    exact = task.reward == "exact" or (task.reward is None and task.name != "gsm8k")
    plain_reward = exact or task.reward in (None, "math_verify")
    idle = [
        ("rollout", "colocate", not traits.has_weights, f"{engine} holds no memory"),
        (
            "pipeline",
            "behavior snapshot_gib",
            config.pipeline.staleness_limit == 0,
            "no sample is older than the learner's weights",
        ),
        ("pipeline", "partial", config.pipeline.mode == "sync", "nothing is sampled while pipeline.mode=sync pushes"),
        ("pipeline", "partial", not traits.samples_live, "a recording is never interrupted"),
        *schedule_rules.idle(config.pipeline, config.rollout, config.learner),
        ("rollout", "bundle_delay_s", traits.samples_live, f"{engine} samples anew"),
        ("rollout", "urls url router", not traits.has_servers, f"{engine} asks no SGLang server"),
        (
            "rollout",
            "trusted_network",
            not rollout.in_the_clear and not in_the_clear(config.kl.teacher),
            "no key crosses a network in the clear",
        ),
        ("rollout", "bundle", traits.samples_live and rollout.bundle is not None, f"{engine} samples anew"),
        (
            "rollout",
            "fake_quantization norm_noise fake_router_noise",
            not traits.has_weights,
            f"{engine} takes no weights",
        ),
        ("replay", "max_local_flip_rate", config.replay.mode == "none", "replay.mode=none replays nothing"),
        ("probe", "save", config.probe.save and config.probe.every == 0, "probe.every=0 probes nothing"),
        ("probe", "tokens", config.probe.tokens > 0 and config.probe.every == 0, "probe.every=0 probes nothing"),
        (
            "probe",
            "bank",
            config.probe.bank > 0 and not (config.probe.every and traits.scores_tokens),
            f"probe.every=0 probes nothing, and {engine} may score no given tokens",
        ),
        ("probe", "thorough_every", config.probe.every == 0, "probe.every=0 probes nothing"),
        ("sampling_mask", "violation", not config.keeps_masks, "sampling_mask.mode=off records no masks"),
        ("task", "max_digits", task.reads_prompts, f"task.name={task.name} reads its prompts from a file"),
        (
            "task",
            "prompts eval_prompts eval_sets template chat",
            not task.reads_prompts,
            f"task.name={task.name} makes its own prompts",
        ),
        (
            "task",
            "chat_template_kwargs",
            not task.reads_prompts and not rollout.has_turns,
            f"task.name={task.name} writes no conversations",
        ),
        ("train", "eval_every", not traits.has_weights, f"{engine} has no weights to evaluate"),
        ("eval", "temperature top_p", config.eval.samples == 0, "eval.samples=0 samples nothing"),
        (
            "eval",
            "samples max_new_tokens keep_best best_metric",
            not task.has_evaluation or not traits.has_weights,
            "nothing is evaluated",
        ),
        ("task", "prompt_field answer_field", task.name != "jsonl", f"task.name={task.name} knows its fields"),
        ("task", "reward_weights", plain_reward and not rollout.has_turns, "the reward is one number"),
        ("task", "reward_timeout_s", exact, "task.reward=exact takes no time"),
        ("task", "reward_processes", exact, "task.reward=exact needs none"),
        (
            "rollout",
            "function_timeout_s max_turns max_tokens",
            not rollout.has_turns,
            "rollout.function is not set: every sample is one answer",
        ),
        (
            "agent",
            "rows tool_parser reasoning_parser model_names host port max_body_bytes",
            rollout.agent is None,
            "rollout.agent is not set",
        ),
        (
            "agent",
            "max_commands max_output_bytes",
            not isinstance(rollout.agent, tuple),
            "rollout.agent is no command line",
        ),
        ("observe", "project", not set(config.observe.sinks) & PROJECTS, "no tracker of observe.sinks has projects"),
        ("observe", "transcript_rollouts", config.observe.transcripts == 0, "observe.transcripts=0 writes none"),
        ("sync", "verify", not traits.has_weights, f"{engine} serves no weights"),
        ("sync", "prove_every", not traits.scores_tokens, f"{engine} does not score given tokens"),
        ("sync", "method", not traits.has_weights, f"{engine} serves no weights"),
        ("sync", "dir", config.sync.method == "distributed", "sync.method=distributed writes no files"),
        ("kl", "estimator ratio clip where", config.kl.coef == 0, "kl.coef=0 makes no use of it"),
        (
            "kl",
            "teacher",
            config.kl.coef == 0 and "reference" not in needs(config.loss.name),
            "neither kl.coef nor the loss makes use of it",
        ),
        ("kl", "target horizon", config.kl.controller == "fixed", "kl.controller=fixed"),
        (
            "kl",
            "ratio clip",
            config.kl.coef > 0 and config.kl.estimator != "k3_is",
            "only kl.estimator=k3_is is weighted",
        ),
        (
            "loss",
            "measure_entropy",
            config.loss.entropy_coef > 0 or "entropy" in needs(config.loss.name),
            "the loss needs the entropy anyway",
        ),
        ("optimizer", "min_lr decay_steps", config.optimizer.schedule == "constant", "optimizer.schedule=constant"),
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
        ("advantage", "normalize_std", not advantage.scales, no_choice),
        ("advantage", "lone_sample", advantage.lone is None, no_choice),
        ("advantage", "turn_discount", advantage.level != "turn", no_choice),
        (
            "advantage",
            "name",
            advantage.level == "turn" and not rollout.may_have_turns,
            "without rollout.function or rollout.agent every sample is one turn, and turn_grpo is grpo",
        ),
        (
            "correction",
            "decide_after",
            not config.correction.rules and not config.correction.preset,
            "there are no rules to decide about",
        ),
        (
            "correction",
            "calibration_steps",
            all(rule.target_reject_rate is None for rule in config.correction.rules),
            "no rule has a target_reject_rate",
        ),
    ]
    for section, keys, idle_now, reason in idle:
        for key in keys.split() if idle_now else ():
            if key in getattr(config, section).model_fields_set:
                yield f"{section}.{key} has no effect: {reason}"
    noise = config.learner.layer_noise
    if not noise.sigma and "sigma_lr" in noise.model_fields_set:
        yield "learner.layer_noise.sigma_lr has no effect: learner.layer_noise.sigma=0"
    # The dtype of an attached server still matters: weights are pushed in it. It may be loading, too.
    started = rollout.server.model_fields_set - {"dtype", "deterministic", "startup_timeout_s"}
    if started and not rollout.starts_server:
        reason = (
            f"rollout.url={', '.join(rollout.addresses)} points at a running server"
            if traits.has_servers
            else f"{engine} starts no server"
        )
        yield f"{', '.join(f'rollout.server.{key}' for key in sorted(started))} has no effect: {reason}"
