"""TRL's GRPO configuration in ours. Read in TRL 1.16 (`GRPOConfig` and what `trl grpo` takes beside it)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from moe_trm.errors import ConfigError
from moe_trm.tools.translate.draft import Draft
from moe_trm.tools.translate.foreign_setting import ForeignSetting, NeedsDecisionError
from moe_trm.tools.translate.sources import plain_settings
from moe_trm.tools.translate.tables import Tables
from moe_trm.tools.translate.template_variables import template_variables
from moe_trm.tools.translate.values import (
    Rule,
    betas,
    choice,
    direct,
    full_vocabulary,
    integer,
    number,
    switch,
    text,
    top_k,
)

TABLES = Tables.read("trl", (integer, number, text), direct)

_LOSSES: Mapping[str, tuple[str, str]] = {
    "grpo": ("ppo_clip", "seq-mean-token-mean"),
    "dr_grpo": ("ppo_clip", "seq-mean-token-sum-norm"),
    "dapo": ("ppo_clip", "token-mean"),
    "cispo": ("cispo", "token-mean"),
    "sapo": ("sapo", "seq-mean-token-mean"),
}
"""A type of loss names a loss and how its tokens are added up."""
_MODES = {
    "token_truncate": "token_tis",
    "token_mask": "token_mis",
    "sequence_truncate": "seq_tis",
    "sequence_mask": "seq_mis",
}
_SCHEDULES = {"constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine"}
_BALANCED = (
    "over all layers together and added up over the K choices of a token: with L layers, loss.router_aux_coef of "
    "K / L times as much is nearest"
)
_TRACKERS = ("wandb", "tensorboard", "mlflow", "trackio")


def from_trl(path: Path, words: Sequence[str] = ()) -> Draft:
    """Translate the YAML file of `trl grpo --config`, or a list of its arguments, with further ones on top.

    Raises:
        ConfigError: the file cannot be read, or has no setting of `GRPOConfig`.
    """
    return translate(plain_settings(path, words), where=str(path))


def translate(settings: Mapping[str, ForeignSetting], *, where: str = "trl") -> Draft:
    """Translate settings by TRL's names. Raises `ConfigError` where none is one of GRPO's."""
    if not {"num_generations", "max_completion_length", "loss_type", "reward_funcs", "beta", "epsilon"} & set(settings):
        raise ConfigError(
            "this is no GRPO configuration of TRL",
            where=where,
            got=", ".join(list(settings)[:5]) or "no setting",
            expected="settings such as num_generations and max_completion_length",
            fix="use `moe-trm config from-verl`, `from-slime` or `from-miles` for theirs",
        )
    variables = template_variables("chat_template_kwargs", settings)
    draft = Draft(settings, TABLES.defaults, "trl")
    return TABLES.settle(TABLES.translate(draft, (*_RULES, variables)))


def _prompts(draft: Draft) -> None:
    if "dataset_name" in draft.settings:
        draft.put("task.name", "jsonl")
        draft.origins["task.name"] = "TRL reads its prompts from a data set"
    name = text(draft, "dataset_name")
    if name is None:
        return
    parts = (name, text(draft, "dataset_config"), text(draft, "dataset_train_split") or "train")
    keys = [key for key in ("dataset_name", "dataset_config", "dataset_train_split") if key in draft.settings]
    draft.put("task.prompts", ":".join(["hf", *(part for part in parts if part)]), *keys)


def _batches(draft: Draft) -> None:
    """Rows of an optimizer step are per device x accumulation x processes; a generation has several such steps."""
    accumulated = integer(draft, "gradient_accumulation_steps") or 1
    rows, size = integer(draft, "per_device_train_batch_size") or 8, integer(draft, "num_generations") or 8
    total_rows, several, ranks = (
        integer(draft, key) for key in ("generation_batch_size", "steps_per_generation", "num_processes")
    )
    if total_rows is None and ranks is not None:
        total_rows = rows * ranks * (several or accumulated)
    elif total_rows is not None and ranks is not None:
        several = total_rows // (rows * ranks)
    keys = [key for key in ("per_device_train_batch_size", "gradient_accumulation_steps") if key in draft.settings]
    if total_rows is None:
        draft.decide(
            "per_device_train_batch_size",
            f"it is for each process: with P processes {rows * (several or accumulated)} P / {size} prompts a step; "
            "put --num_processes P behind the file",
            "rollout.prompts_per_step",
        )
    elif total_rows % size:
        draft.decide(
            "num_generations", f"{total_rows} samples do not split into groups of {size}", "rollout.prompts_per_step"
        )
    else:
        total_keys = [key for key in ("generation_batch_size", "num_processes") if key in draft.settings]
        draft.put("rollout.prompts_per_step", total_rows // size, *total_keys, *keys)
    if several is None and "generation_batch_size" in draft.settings:
        raise NeedsDecisionError("generation_batch_size", "optimizer steps of it depend on --num_processes")
    steps = several or accumulated
    if steps % accumulated:
        raise NeedsDecisionError("steps_per_generation", f"{steps} do not split into steps of {accumulated}")
    step_keys = [key for key in ("steps_per_generation", "gradient_accumulation_steps") if key in draft.settings]
    draft.put("learner.minibatches", steps // accumulated, *(step_keys or ["steps_per_generation"]))


def _steps(draft: Draft) -> None:
    """TRL counts optimizer steps, and we count generations."""
    steps, epochs = integer(draft, "max_steps"), integer(draft, "num_iterations") or 1
    if steps is None or steps <= 0:
        draft.miss("max_steps", "no bound")
        raise NeedsDecisionError("num_train_epochs", "runs are counted in steps here: write train.steps")
    minibatches = draft.values.get("learner.minibatches")
    if not isinstance(minibatches, int):
        raise NeedsDecisionError("max_steps", "optimizer steps of a generation are not known")
    draft.miss("num_train_epochs", "no effect with max_steps")
    if steps % (minibatches * epochs):
        raise NeedsDecisionError(
            "max_steps", f"{steps} optimizer steps do not split into {minibatches * epochs} a batch"
        )
    draft.put("train.steps", steps // (minibatches * epochs), "max_steps")


def _loss(draft: Draft) -> None:
    kind, level = text(draft, "loss_type") or "dapo", text(draft, "importance_sampling_level")
    if kind not in _LOSSES:
        raise NeedsDecisionError("loss_type", f"{kind}: not a loss of ours in this form")
    loss, aggregation = _LOSSES[kind]
    if level == "sequence":
        if loss != "ppo_clip":
            raise NeedsDecisionError("importance_sampling_level", f"{kind} has a ratio for each token here")
        loss = "gspo"
    named = [key for key in ("loss_type", "importance_sampling_level") if key in draft.settings]
    draft.put("loss.name", loss, *(named or ["loss_type"]))
    draft.put("loss.aggregation", aggregation, "loss_type")
    if loss == "sapo":
        names = {"tau_positive": "sapo_temperature_pos", "tau_negative": "sapo_temperature_neg"}
        draft.put("loss.parameters", {ours: number(draft, key) for ours, key in names.items()}, *names.values())
        return
    above = "epsilon_high" if draft.take("epsilon_high") is not None else "epsilon"
    draft.put("loss.clip_high", number(draft, above), above)
    if loss == "cispo":
        draft.put("loss.parameters", {"cap_is_absolute": True}, above)
        return
    draft.put("loss.clip_low", number(draft, "epsilon"), "epsilon")
    if draft.take("delta") is not None:
        if loss != "ppo_clip":
            raise NeedsDecisionError("delta", f"loss {loss} has no bound for negative advantages here")
        draft.put("loss.dual_clip", number(draft, "delta"), "delta")


def _advantage(draft: Draft) -> None:
    key = "scale_rewards"
    scale = draft.take(key)
    if scale in ("group", True):
        draft.put("advantage.name", "grpo", key)
    elif scale in ("none", False):
        draft.put("advantage.name", "dr_grpo", key)
    else:
        raise NeedsDecisionError(key, f"{scale}: rewards are compared in their group here")


def _correction(draft: Draft) -> None:
    """TRL weighs by the policy at the step's start over vLLM's log-probs: our merged ratio."""
    keys = ("vllm_importance_sampling_mode", "vllm_importance_sampling_cap", "vllm_importance_sampling_clip_max")
    if not switch(draft, "use_vllm") or not switch(draft, "vllm_importance_sampling_correction"):
        draft.put("correction.rules", [], "vllm_importance_sampling_correction")
        return
    mode = text(draft, keys[0])
    if mode not in _MODES:
        raise NeedsDecisionError(keys[0], f"{mode}: not a rule of ours")
    cap = next((value for key in keys[1:] if (value := number(draft, key)) is not None), None)
    low = number(draft, "vllm_importance_sampling_clip_min") or 0.0
    masks = mode.endswith("mask")
    if cap is None:
        raise NeedsDecisionError(keys[2], "no upper bound: rules here have one, so write one that no ratio reaches")
    bounds = {"low": low, "high": cap} if masks else {"cap": cap, "floor": low}
    present_keys = [key for key in (*keys, "vllm_importance_sampling_clip_min") if key in draft.settings]
    draft.put(
        "correction.rules",
        [{"name": _MODES[mode], "thresholds": {**bounds, "ratio": "merged"}}],
        *(present_keys or keys[:1]),
    )


def _kl(draft: Draft) -> None:
    coefficient = number(draft, "beta")
    if not coefficient:
        draft.miss("beta", "off, as here")
        draft.miss("use_bias_correction_kl", "no effect without beta")
        return
    draft.put("kl.coef", coefficient, "beta")
    corrected = switch(draft, "use_bias_correction_kl")
    if corrected and text(draft, "importance_sampling_level") == "sequence":
        raise NeedsDecisionError(
            "use_bias_correction_kl", "weighs each token's KL by the ratio of its sequence; k3_is has the token's own"
        )
    draft.put("kl.estimator", "k3_is" if corrected else "k3", "use_bias_correction_kl" if corrected else "beta")
    if corrected:
        draft.put("kl.ratio", "update", "use_bias_correction_kl")


def _engine(draft: Draft) -> None:
    if not switch(draft, "use_vllm"):
        draft.remark("TRL samples with transformers here; ours is a server (rollout.engine)")
        return
    mode = text(draft, "vllm_mode")
    draft.put("rollout.colocate", mode == "colocate", "vllm_mode")


def _auxiliary(draft: Draft) -> None:
    key = "router_aux_loss_coef"
    coefficient = number(draft, key)
    if coefficient is None:
        draft.remark(f"TRL adds the routers' load-balancing loss with the {key} of config.json, {_BALANCED}")
    elif coefficient:
        raise NeedsDecisionError(
            key,
            f"a term of the objective that balances experts, {_BALANCED}",
        )
    else:
        draft.same(key)


def _adaptive(draft: Draft) -> None:
    key = "use_adaptive_entropy"
    if switch(draft, key):
        draft.translated.pop("entropy_coef", None)
        raise NeedsDecisionError(key, "the coefficient of the entropy is fixed here: loss.entropy_coef")
    draft.miss(key, "off, as always here")
    for name in ("coef_min", "coef_max", "coef_delta", "target"):
        draft.miss(f"entropy_{name}", "use_adaptive_entropy is off")
    if draft.values.get("loss.entropy_coef") and draft.values.get("loss.aggregation") != "token-mean":
        draft.remark("TRL's entropy bonus is a mean over tokens; ours is added up as loss.aggregation has it")


def _precision(draft: Draft) -> None:
    half = switch(draft, "fp16")
    draft.put("learner.dtype", "float16" if half else "bfloat16" if switch(draft, "bf16") else "float32",
              "fp16" if half else "bf16")  # fmt: skip


def _warmup(draft: Draft) -> None:
    if number(draft, "warmup_ratio"):
        raise NeedsDecisionError("warmup_ratio", "a share of the run: write the steps")
    steps = number(draft, "warmup_steps")
    if steps is not None and 0 < steps < 1:
        raise NeedsDecisionError("warmup_steps", "a share of the run: write the steps")
    draft.put("optimizer.warmup_steps", integer(draft, "warmup_steps"), "warmup_steps")


def _adapters(draft: Draft) -> None:
    if not switch(draft, "use_peft"):
        for key in ("lora_r", "lora_alpha"):
            draft.miss(key, "no adapters: the weights themselves train")
        return
    draft.put("learner.lora.rank", integer(draft, "lora_r"), "lora_r")
    draft.put("learner.lora.alpha", number(draft, "lora_alpha"), "lora_alpha")


def _adapted(draft: Draft) -> None:
    if not switch(draft, "use_peft"):
        return
    names = draft.take("lora_target_modules")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        draft.decide(
            "lora_target_modules",
            f"{names}: peft chooses modules by the kind of model, often q_proj and v_proj alone; write their names",
            "learner.lora.targets",
        )
    else:
        draft.put("learner.lora.targets", names, "lora_target_modules")
    if draft.take("lora_dropout"):
        draft.decide("lora_dropout", "adapters here have no dropout")


def _recompute(draft: Draft) -> None:
    key = "gradient_checkpointing"
    draft.put("learner.recompute", "full" if switch(draft, key) else "none", key)


def _trackers(draft: Draft) -> None:
    tracker_value = draft.take("report_to")
    names = [tracker_value] if isinstance(tracker_value, str) else tracker_value or []
    unknown = [name for name in names if name not in (*_TRACKERS, "none")]
    if unknown:
        raise NeedsDecisionError(
            "report_to", f"{', '.join(map(str, unknown))}: trackers here are {', '.join(_TRACKERS)}"
        )
    if sinks := [name for name in names if name != "none"]:
        draft.put("observe.sinks", sinks, "report_to")


_BATCH_KEYS = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "generation_batch_size",
    "steps_per_generation",
    "num_processes",
)
_RULES: Sequence[Rule] = (
    Rule(("dataset_name", "dataset_config", "dataset_train_split"), ("task.prompts",), _prompts),
    top_k("top_k"),
    Rule(_BATCH_KEYS, ("rollout.prompts_per_step", "learner.minibatches"), _batches),
    direct("per_device_train_batch_size", "learner.micro_batch_rows", integer),
    Rule(("max_steps", "num_train_epochs"), ("train.steps",), _steps),
    betas(("adam_beta1", "adam_beta2")),
    choice("lr_scheduler_type", "optimizer.schedule", _SCHEDULES, "not a schedule of ours"),
    Rule(("warmup_steps", "warmup_ratio"), ("optimizer.warmup_steps",), _warmup),
    Rule(
        (
            "loss_type",
            "importance_sampling_level",
            "epsilon",
            "epsilon_high",
            "delta",
            "sapo_temperature_pos",
            "sapo_temperature_neg",
        ),
        ("loss.name", "loss.aggregation", "loss.parameters", "loss.clip_low", "loss.clip_high", "loss.dual_clip"),
        _loss,
    ),
    Rule(("scale_rewards",), ("advantage.name",), _advantage),
    choice("mask_truncated_completions", "batch.overlong", {True: "mask", False: "keep"}, "true or false"),
    Rule(
        (
            "use_vllm",
            "vllm_importance_sampling_correction",
            "vllm_importance_sampling_mode",
            "vllm_importance_sampling_cap",
            "vllm_importance_sampling_clip_min",
            "vllm_importance_sampling_clip_max",
        ),
        ("correction.rules",),
        _correction,
    ),
    Rule(("beta", "use_bias_correction_kl"), ("kl.coef", "kl.estimator", "kl.ratio"), _kl),
    Rule(("use_vllm", "vllm_mode"), ("rollout.colocate",), _engine),
    Rule(("router_aux_loss_coef",), ("loss.router_aux_coef",), _auxiliary),
    Rule(
        (
            "use_adaptive_entropy",
            "entropy_coef",
            *(f"entropy_{name}" for name in ("coef_min", "coef_max", "coef_delta", "target")),
        ),
        ("loss.entropy_coef",),
        _adaptive,
    ),
    Rule(("bf16", "fp16"), ("learner.dtype",), _precision),
    Rule(("gradient_checkpointing",), ("learner.recompute",), _recompute),
    Rule(("use_peft", "lora_r", "lora_alpha"), ("learner.lora.rank", "learner.lora.alpha"), _adapters),
    Rule(("use_peft", "lora_target_modules", "lora_dropout"), ("learner.lora.targets",), _adapted),
    full_vocabulary(("top_p", "top_k", "min_p")),
    Rule(("report_to",), ("observe.sinks",), _trackers),
)
