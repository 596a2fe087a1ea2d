"""verl's configuration (its YAML, or a launch script with `key=value` words) in ours. Keys as in verl 0.7."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_trm.config.load import read_plain, yaml_value
from moe_trm.config.translate.draft import Draft
from moe_trm.config.translate.verl_correction import correction, kl
from moe_trm.config.translate.words import script_words, unread

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_OPTIM, _MEGATRON = f"{_ACTOR}.optim", f"{_ACTOR}.megatron"

DEFAULTS: Mapping[str, Any] = {
    "data.train_batch_size": 1024,
    "data.max_response_length": 512,
    f"{_ROLLOUT}.n": 1,
    f"{_ACTOR}.ppo_mini_batch_size": 256,
    f"{_ACTOR}.clip_ratio_c": 3.0,
    f"{_OPTIM}.lr": 1e-6,
    f"{_OPTIM}.weight_decay": 0.01,
    f"{_OPTIM}.betas": [0.9, 0.999],
    "algorithm.adv_estimator": "gae",
}
"""verl's defaults where we would use something else."""


SCHEDULES = {"constant": "constant", "linear": "linear", "cosine": "cosine", "WSD": "wsd"}
"""Megatron's names of learning-rate schedules, which slime uses too."""


def _once(key: str) -> Callable[[Draft, Any, str], None]:
    return lambda draft, value, origin: draft.put(key, value, origin)


def _files(key: str) -> Callable[[Draft, Any, str], None]:
    def put(draft: Draft, value: Any, origin: str) -> None:
        files = value if isinstance(value, list) else [value]
        draft.put(key, files[0], origin)
        if len(files) > 1:
            draft.miss(origin, f"one file is read: {files[0]}; put the others into it")

    return put


def _choice(key: str, choices: Mapping[Any, Any], reason: str) -> Callable[[Draft, Any, str], None]:
    def put(draft: Draft, value: Any, origin: str) -> None:
        if value in choices:
            draft.put(key, choices[value], origin)
        else:
            draft.miss(origin, f"{value}: {reason}")

    return put


def _top_k(draft: Draft, value: Any, origin: str) -> None:
    draft.put("rollout.top_k", value if isinstance(value, int) and value > 0 else None, origin)


def _when(key: str, expected: Any, reason: str) -> Callable[[Draft, Any, str], None]:
    """A switch whose usual position needs no translation; the other has no equivalent."""

    def put(draft: Draft, value: Any, origin: str) -> None:
        if value != expected:
            draft.miss(origin, reason)

    return put


_DIRECT: Mapping[str, Callable[[Draft, Any, str], None]] = {
    "data.train_files": _files("task.prompts"),
    "data.val_files": _files("task.eval_prompts"),
    "data.train_batch_size": _once("rollout.prompts_per_step"),
    "data.max_response_length": _once("rollout.max_new_tokens"),
    "data.truncation": _when("data.truncation", "error", "prompts are never truncated here"),
    "data.seed": _once("seed"),
    "actor_rollout_ref.model.path": _once("model.checkpoint"),
    f"{_ROLLOUT}.n": _once("rollout.group_size"),
    f"{_ROLLOUT}.temperature": _once("rollout.temperature"),
    f"{_ROLLOUT}.top_p": _once("rollout.top_p"),
    f"{_ROLLOUT}.top_k": _top_k,
    f"{_ROLLOUT}.dtype": _once("rollout.server.dtype"),
    f"{_ROLLOUT}.quantization": _once("rollout.quantization"),
    f"{_ROLLOUT}.tensor_model_parallel_size": _once("rollout.server.tensor_parallel"),
    f"{_ROLLOUT}.max_num_seqs": _once("rollout.server.max_running_requests"),
    f"{_ROLLOUT}.name": _when(f"{_ROLLOUT}.name", "sglang", "SGLang rolls out here"),
    f"{_ACTOR}.strategy": _choice("learner.backend", {"megatron": "megatron"}, "the learner is Megatron-Core"),
    f"{_ACTOR}.clip_ratio_low": _once("loss.clip_low"),
    f"{_ACTOR}.clip_ratio_high": _once("loss.clip_high"),
    f"{_ACTOR}.loss_agg_mode": _once("loss.aggregation"),
    f"{_OPTIM}.lr": _once("optimizer.lr"),
    f"{_OPTIM}.lr_warmup_steps": lambda draft, value, origin: draft.put(
        "optimizer.warmup_steps", max(value, 0), origin
    ),
    f"{_OPTIM}.weight_decay": _once("optimizer.weight_decay"),
    f"{_OPTIM}.betas": _once("optimizer.betas"),
    f"{_OPTIM}.clip_grad": _once("optimizer.max_grad_norm"),
    f"{_MEGATRON}.tensor_model_parallel_size": _once("learner.parallel.tensor"),
    f"{_MEGATRON}.pipeline_model_parallel_size": _once("learner.parallel.pipeline"),
    f"{_MEGATRON}.virtual_pipeline_model_parallel_size": _once("learner.parallel.virtual_pipeline"),
    f"{_MEGATRON}.context_parallel_size": _once("learner.parallel.context"),
    f"{_MEGATRON}.expert_model_parallel_size": _once("learner.parallel.expert"),
    f"{_MEGATRON}.expert_tensor_parallel_size": _once("learner.parallel.expert_tensor"),
    f"{_MEGATRON}.dtype": _once("learner.dtype"),
    f"{_MEGATRON}.use_distributed_optimizer": _once("learner.distributed_optimizer"),
    f"{_MEGATRON}.override_transformer_config.recompute_granularity": _once("learner.recompute"),
    "algorithm.norm_adv_by_std_in_grpo": _once("advantage.normalize_std"),
    f"{_OPTIM}.lr_decay_style": _choice("optimizer.schedule", SCHEDULES, "not a schedule of ours"),
    f"{_OPTIM}.min_lr": _once("optimizer.min_lr"),
    f"{_OPTIM}.lr_decay_steps": _once("optimizer.decay_steps"),
    "actor_rollout_ref.model.override_config.moe_config.freeze_moe_router": _once("learner.freeze_router"),
    "data.prompt_key": _once("task.prompt_field"),
    "algorithm.filter_groups.enable": lambda draft, value, origin: draft.put(
        "batch.zero_variance", "drop" if value else "keep", origin
    ),
    f"{_ACTOR}.entropy_coeff": _once("loss.entropy_coef"),
    "trainer.total_training_steps": _once("train.steps"),
    "trainer.experiment_name": _once("name"),
    "trainer.test_freq": lambda draft, value, origin: draft.put("train.eval_every", max(value, 0), origin),
}

_ADVANTAGES = {
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "opo": "opo",
    "gpg": "gpg",
    "grpo_passk": "pass_at_k",
    "reinforce_plus_plus": "reinforce_plus_plus",
    "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
}
_LOSSES = {
    "vanilla": "ppo_clip",
    "gspo": "gspo",
    "sapo": "sapo",
    "gpg": "gpg",
    "clip_cov": "clip_cov",
    "kl_cov": "kl_cov",
    "geo_mean": "gmpo",
    "cispo": "cispo",
}

TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")

_IDLE = ("trainer.", "global_profiler", "ray_kwargs", "transfer_queue", "hydra", "critic.", "reward_model.")
"""Sections about verl's own machinery; told in one line each, not key by key."""


def from_verl(path: Path, overrides: Sequence[str] = ()) -> Draft:
    """Translate a verl YAML file or launch script, with further `key=value` words on top.

    Raises:
        ConfigError: the file cannot be read.
    """
    words = list(overrides)
    if path.suffix in (".yaml", ".yml"):
        settings = _flat(read_plain(path))
    else:
        settings, words = {}, [*script_words(path), *words]
    draft = Draft()
    settings |= _overrides(words, draft)
    return translate(settings, draft)


def translate(settings: Mapping[str, Any], draft: Draft) -> Draft:
    """Translate flat settings by verl's dotted keys into `draft`."""
    known = {key: value for key, value in DEFAULTS.items() if key not in settings}
    both = {**known, **{key: value for key, value in settings.items() if not _interpolated(value)}}
    used: set[str] = set()

    def take(key: str) -> Any:
        used.add(key)
        return both.get(key)

    for key, put in _DIRECT.items():
        value = take(key)
        if value is not None:
            put(draft, value, _origin(key, known))
    _advantage(draft, take)
    _loss(draft, take, known)
    _replay(draft, take)
    _batches(draft, take, known)
    correction(draft, take)
    kl(draft, take)
    _keeping(draft, take)
    _evaluation(draft, take)
    _reward(draft, take)
    if "rollout.group_size" in draft.values and "task.prompts" in draft.values:
        draft.put("task.name", "jsonl", "data.train_files")
    for key, value in settings.items():
        if key not in used and not _interpolated(value) and not _off(key, value):
            _leave(draft, key)
    return draft


def _origin(key: str, defaults: Mapping[str, Any]) -> str:
    return f"{key} (verl's default)" if key in defaults else key


def _advantage(draft: Draft, take: Callable[[str], Any]) -> None:
    name = take("algorithm.adv_estimator")
    if name in _ADVANTAGES:
        draft.put("advantage.name", _ADVANTAGES[name], "algorithm.adv_estimator")
    else:
        draft.miss("algorithm.adv_estimator", f"{name}: no critic and no greedy baseline here; grpo is used")


def _loss(draft: Draft, take: Callable[[str], Any], defaults: Mapping[str, Any]) -> None:
    mode = take(f"{_ACTOR}.policy_loss.loss_mode") or "vanilla"
    if mode in _LOSSES:
        draft.put("loss.name", _LOSSES[mode], f"{_ACTOR}.policy_loss.loss_mode")
    else:
        draft.miss(
            f"{_ACTOR}.policy_loss.loss_mode", f"{mode}: not a loss of ours; see `moe-trm config explain loss.name`"
        )
    clip, key = take(f"{_ACTOR}.clip_ratio"), f"{_ACTOR}.clip_ratio"
    for side in ("low", "high"):
        if clip is not None and f"loss.clip_{side}" not in draft.values:
            draft.put(f"loss.clip_{side}", clip, key)
    dual, key = take(f"{_ACTOR}.clip_ratio_c"), f"{_ACTOR}.clip_ratio_c"
    if mode == "vanilla":
        draft.put("loss.dual_clip", dual, _origin(key, defaults))


def _replay(draft: Draft, take: Callable[[str], Any]) -> None:
    mode, switch = f"{_ACTOR}.router_replay.mode", f"{_ROLLOUT}.enable_rollout_routing_replay"
    chosen, recorded = take(mode), take(switch)
    if chosen == "R3" and not recorded:
        draft.remark(
            f"{mode}=R3 without {switch}: verl would have had no routes to replay; here R3 records them by itself"
        )
    draft.put("replay.mode", {"R2": "R2", "R3": "R3"}.get(chosen or "", "none"), mode)


def _batches(draft: Draft, take: Callable[[str], Any], defaults: Mapping[str, Any]) -> None:
    prompts, mini = take("data.train_batch_size"), take(f"{_ACTOR}.ppo_mini_batch_size")
    key = f"{_ACTOR}.ppo_mini_batch_size"
    if prompts and mini:
        if prompts % mini:
            draft.miss(key, f"{prompts} prompts do not split into minibatches of {mini}")
        else:
            draft.put("learner.minibatches", prompts // mini, _origin(key, defaults))
    budget, rows = take(f"{_ACTOR}.ppo_max_token_len_per_gpu"), take(f"{_ACTOR}.ppo_micro_batch_size_per_gpu")
    if take(f"{_ACTOR}.use_dynamic_bsz"):
        draft.put("learner.micro_batch_tokens", budget or 16384, f"{_ACTOR}.ppo_max_token_len_per_gpu")
    else:
        draft.put("learner.micro_batch_rows", rows, f"{_ACTOR}.ppo_micro_batch_size_per_gpu")
    epochs = take(f"{_ACTOR}.ppo_epochs")
    if epochs is not None:
        draft.put("learner.epochs", epochs, f"{_ACTOR}.ppo_epochs")


def _keeping(draft: Draft, take: Callable[[str], Any]) -> None:
    every, keep = take("trainer.save_freq"), take("trainer.max_actor_ckpt_to_keep")
    if every and every > 0:
        draft.put("checkpoint.every", every, "trainer.save_freq")
    draft.put("checkpoint.keep", keep, "trainer.max_actor_ckpt_to_keep")
    if take("trainer.resume_mode") == "disable":
        draft.put("checkpoint.resume", "never", "trainer.resume_mode")
    loggers = take("trainer.logger") or []
    known = [name for name in loggers if name in TRACKERS]
    if known:
        draft.put("observe.sinks", known, "trainer.logger")
    for name in loggers:
        if name not in (*TRACKERS, "console"):
            draft.miss("trainer.logger", f"{name}: trackers here are {', '.join(TRACKERS)}")


def _evaluation(draft: Draft, take: Callable[[str], Any]) -> None:
    """verl samples `n` answers to each held-out prompt; one answer at temperature 0 is our greedy evaluation."""
    key = f"{_ROLLOUT}.val_kwargs"
    samples, temperature, top_p = (take(f"{key}.{name}") for name in ("n", "temperature", "top_p"))
    if samples and (samples > 1 or take(f"{key}.do_sample")):
        draft.put("eval.samples", samples, f"{key}.n")
        draft.put("eval.temperature", temperature or None, f"{key}.temperature")
        draft.put("eval.top_p", top_p, f"{key}.top_p")


def _reward(draft: Draft, take: Callable[[str], Any]) -> None:
    path, name = take("custom_reward_function.path"), take("custom_reward_function.name")
    if path:
        draft.put("task.reward", f"{path}:{name or 'compute_score'}", "custom_reward_function.path")
        draft.remark("the reward function's arguments differ: see docs/tasks.md")


def _leave(draft: Draft, key: str) -> None:
    section = next((section for section in _IDLE if key.startswith(section)), None)
    if section is None:
        draft.miss(key, "no equivalent")
    elif section not in ("trainer.", "hydra"):
        draft.miss(f"{section.rstrip('.')}.*", "verl's own machinery, which has no counterpart here")


def _off(key: str, value: Any) -> bool:
    """A feature that is not used needs no equivalent."""
    return value in (None, False, 0, -1, "", [], {}) or key.endswith("._target_") or ".profiler." in key


def _interpolated(value: Any) -> bool:
    return isinstance(value, str) and "${" in value


def _overrides(words: Sequence[str], draft: Draft) -> dict[str, Any]:
    """`key=value` words; others (python3, -m, ...) are the launcher's."""
    settings = {}
    for word in words:
        key, equals, value = word.partition("=")
        key = key.lstrip("+")
        if not equals or "." not in key or "/" in key or key.startswith("-"):
            continue
        if unread(value):
            draft.miss(key, f"the script computes it: {value}")
        else:
            settings[key] = yaml_value(value)
    return settings


def _flat(data: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(data, dict) or not data:
        return {prefix: data}
    return {
        leaf: value
        for key, inner in data.items()
        for leaf, value in _flat(inner, f"{prefix}.{key}" if prefix else str(key)).items()
    }
