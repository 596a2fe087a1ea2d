"""verl's configuration in ours. Keys and defaults as in verl of August 2026."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from moe_trm.errors import ConfigError
from moe_trm.tools.translate.draft import Draft
from moe_trm.tools.translate.foreign_setting import ForeignSetting, NeedsDecisionError
from moe_trm.tools.translate.megatron_fp8 import BFLOAT16_LAYERS, fp8
from moe_trm.tools.translate.router_losses import router_losses
from moe_trm.tools.translate.sources import hydra_settings
from moe_trm.tools.translate.tables import Tables
from moe_trm.tools.translate.template_variables import template_variables
from moe_trm.tools.translate.values import (
    MEGATRON_SCHEDULES,
    Rule,
    direct,
    full_vocabulary,
    integer,
    number,
    pair,
    switch,
    text,
    top_k,
)
from moe_trm.tools.translate.verl_correction import CORRECTION, KL
from moe_trm.tools.translate.verl_keys import ACTOR, MEGATRON, OPTIM, ROLLOUT
from moe_trm.tools.translate.verl_loss import LOSS
from moe_trm.tools.translate.verl_run import RUN

TABLES = Tables.read("verl", (integer, number, switch, text), direct)

MODEL = "actor_rollout_ref.model"
BASES = ("ppo_trainer", "ppo_megatron_trainer")
"""verl's base configurations that have these defaults."""

_TRANSFORMER = f"{MEGATRON}.override_transformer_config"
_PICTURES = ("data.image_key", "data.video_key")
_FSDP_DTYPE = f"{ACTOR}.fsdp_config.dtype"
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_DTYPES |= {name: name for name in _DTYPES.values()}
_UNPADDED = "actor_rollout_ref.model.use_remove_padding"

_ADVANTAGES = {
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "gdpo": "gdpo",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "opo": "opo",
    "gpg": "gpg",
    "grpo_passk": "pass_at_k",
    "reinforce_plus_plus": "reinforce_plus_plus",
    "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
    "remax": "remax",
}


def from_verl(path: Path, overrides: Sequence[str] = ()) -> Draft:
    """Translate Hydra's composed YAML, a list of `key=value`, or a launch script, with further `key=value` on top.

    Raises:
        ConfigError: the file cannot be read, or has no setting of verl.
    """
    return translate(hydra_settings(path, overrides), where=str(path))


def translate(settings: Mapping[str, ForeignSetting], *, where: str = "verl") -> Draft:
    """Translate settings by verl's dotted keys. Raises `ConfigError` where none is verl's."""
    if not any(key.startswith(("actor_rollout_ref.", "algorithm.")) for key in settings):
        raise ConfigError(
            "this is no configuration of verl",
            where=where,
            got=", ".join(list(settings)[:5]) or "no key=value",
            expected="keys such as actor_rollout_ref.model.path",
            fix="use `moe-trm config from-slime` or `from-miles` for lists of --flags",
        )
    draft = Draft(settings, TABLES.defaults, "verl")
    variables = template_variables("data.apply_chat_template_kwargs", settings)
    return TABLES.settle(TABLES.translate(draft, (*_RULES, *LOSS, *CORRECTION, *KL, *RUN, variables)))


def _base(draft: Draft) -> None:
    for key in ("--config-path", "--config-dir"):
        draft.miss(key, "where Hydra looks for the base configuration")
    name = text(draft, "--config-name")
    if name is not None and name.removesuffix(".yaml") not in BASES:
        raise NeedsDecisionError("--config-name", f"the base configuration {name} is not in this file: compose it")
    draft.miss("--config-name", "the base configuration, whose defaults are written out where ours differ")


def _files(key: str, ours: str, several: str = "") -> Rule:
    def apply(draft: Draft) -> None:
        value = draft.take(key)
        files = [value] if isinstance(value, str) else value
        if files is None:
            return
        if not isinstance(files, list) or not files or not all(isinstance(file, str) for file in files):
            raise NeedsDecisionError(key, f"a file or a list of files is expected, not {value}")
        names = {Path(file).stem: file for file in files}
        if len(files) == 1:
            draft.put(ours, files[0], key)
        elif several and len(names) == len(files):
            draft.put(several, names, key)
        else:
            raise NeedsDecisionError(key, "several files: put them into one")

    return Rule((key,), (ours,), apply)


def _task(draft: Draft) -> None:
    draft.put("task.name", "jsonl")
    draft.origins["task.name"] = "verl reads its prompts from files"
    draft.put("task.prompt_field", text(draft, "data.prompt_key") or "prompt", "data.prompt_key")


def _advantage(draft: Draft) -> None:
    name = text(draft, "algorithm.adv_estimator")
    if name in ("optimal_token_baseline", "tir_optimal_token_baseline"):
        raise NeedsDecisionError(
            "algorithm.adv_estimator",
            f"{name}: advantage.name=otb reads the recorded distributions (sampling_mask.mode=keep), and weighs by the "
            "ratio to the rollout whatever the correction",
        )
    if name not in _ADVANTAGES:
        raise NeedsDecisionError("algorithm.adv_estimator", f"{name}: there is no critic here")
    draft.put("advantage.name", _ADVANTAGES[name], "algorithm.adv_estimator")
    if _ADVANTAGES[name] in ("grpo", "pass_at_k"):
        normalize = draft.take("algorithm.norm_adv_by_std_in_grpo")
        if normalize is not None:
            value = switch(draft, "algorithm.norm_adv_by_std_in_grpo")
            draft.put("advantage.normalize_std", value, "algorithm.norm_adv_by_std_in_grpo")


def _batches(draft: Draft) -> None:
    keys = ("data.train_batch_size", f"{ACTOR}.ppo_mini_batch_size")
    prompts, mini = (integer(draft, key) for key in keys)
    if prompts and mini:
        if prompts % mini:
            raise NeedsDecisionError(keys[1], f"{prompts} prompts do not split into minibatches of {mini}")
        draft.put("learner.minibatches", prompts // mini, *keys)


def _micro_batches(draft: Draft) -> None:
    dynamic, budget, rows = (
        f"{ACTOR}.{name}" for name in ("use_dynamic_bsz", "ppo_max_token_len_per_gpu", "ppo_micro_batch_size_per_gpu")
    )
    if switch(draft, dynamic):
        # Ranks that share sequences have one budget together there; whole sequences are counted here.
        shared = f"{MEGATRON}.context_parallel_size"
        tokens, context = integer(draft, budget), integer(draft, shared) or 1
        keys = (budget, dynamic, shared) if context > 1 else (budget, dynamic)
        draft.put("learner.micro_batch_tokens", None if tokens is None else tokens * context, *keys)
    elif (value := integer(draft, rows)) is not None:
        draft.put("learner.micro_batch_rows", value, rows, dynamic)
    else:
        draft.decide(dynamic, "off, and no micro-batch size is given", "learner.micro_batch_rows")


def _layout(draft: Draft) -> None:
    """Both compute the same, and budgets of tokens count without padding in both."""
    if draft.take(_UNPADDED) is not None:
        draft.put("batch.layout", "packed" if switch(draft, _UNPADDED) else "padded", _UNPADDED)


def _warmup(draft: Draft) -> None:
    steps, ratio = f"{OPTIM}.lr_warmup_steps", f"{OPTIM}.lr_warmup_steps_ratio"
    count, share = integer(draft, steps), number(draft, ratio)
    if count is not None and count > 0:
        draft.put("optimizer.warmup_steps", count, steps)
    elif share:
        raise NeedsDecisionError(ratio, f"warm-up is {share} of all optimizer steps: write their number")
    else:
        draft.put("optimizer.warmup_steps", 0, *([steps] if steps in draft.settings else [ratio]))


def _schedule(draft: Draft) -> None:
    for key in (f"{OPTIM}.lr_decay_style", f"{OPTIM}.lr_scheduler_type"):
        value = text(draft, key)
        if value is None:
            continue
        if value not in MEGATRON_SCHEDULES:
            raise NeedsDecisionError(key, f"{value}: not a schedule of ours")
        if draft.values.get("optimizer.schedule", MEGATRON_SCHEDULES[value]) != MEGATRON_SCHEDULES[value]:
            del draft.values["optimizer.schedule"]
            raise NeedsDecisionError(key, "two schedules are named")
        draft.put("optimizer.schedule", MEGATRON_SCHEDULES[value], key)
    if draft.values.get("optimizer.schedule") == "wsd":
        draft.read("optimizer.final_steps", integer, f"{OPTIM}.lr_wsd_decay_steps")
        if text(draft, f"{OPTIM}.lr_wsd_decay_style") not in (None, "linear"):
            raise NeedsDecisionError(f"{OPTIM}.lr_wsd_decay_style", "the way down of `wsd` is linear here")
    ratio = number(draft, f"{OPTIM}.min_lr_ratio")
    if ratio and draft.values.get("optimizer.schedule", "constant") != "constant":
        rate = number(draft, f"{OPTIM}.lr") or 0.0
        draft.put("optimizer.min_lr", ratio * rate, f"{OPTIM}.min_lr_ratio", f"{OPTIM}.lr")


def _clipped(draft: Draft) -> None:
    """Megatron reads the bound in its optimizer's settings, and FSDP, torchtitan and VeOmni in the actor's."""
    keys = (f"{OPTIM}.clip_grad", f"{ACTOR}.grad_clip")
    read, ignored = keys if text(draft, f"{ACTOR}.strategy") == "megatron" else keys[::-1]
    if read not in draft.settings and ignored in draft.settings and f"{ACTOR}.strategy" not in draft.settings:
        read, ignored = ignored, read
    if (bound := number(draft, read)) is not None:
        draft.put("optimizer.max_grad_norm", bound, read)
    draft.miss(ignored, "not read by the learner that is named")


def _pictures(draft: Draft) -> None:
    """A composed file names both fields, whether or not there are pictures; a script names the one that it has."""
    composed = all(key in draft.settings for key in _PICTURES)
    for key, name in zip(_PICTURES, ("images", "videos"), strict=True):
        if composed and draft.take(key) == name:
            draft.miss(key, "verl's default field, which rows need not have")
        elif draft.take(key) is not None:
            draft.decide(
                key,
                "pictures: task.image_field names their field, for Qwen3-VL-MoE with learner.backend=deepspeed and "
                "SGLang alone (docs/pictures.md)"
                if name == "images"
                else "video: a row that has any cannot be trained on",
            )


def _strategy(draft: Draft) -> None:
    key = f"{ACTOR}.strategy"
    value = text(draft, key)
    if value == "megatron":
        draft.put("learner.backend", "megatron", key)
    else:
        draft.miss(key, f"{value}: the learner here is Megatron-Core, or DeepSpeed with learner.backend")


def _expert_tensor(draft: Draft) -> None:
    """Megatron-Core takes the tensor-parallel size where the experts' own is null."""
    expert_key, dense = f"{MEGATRON}.expert_tensor_parallel_size", f"{MEGATRON}.tensor_model_parallel_size"
    value, fallback = integer(draft, expert_key), integer(draft, dense)
    if value is not None:
        draft.put("learner.parallel.expert_tensor", value, expert_key)
    elif fallback is not None:
        draft.put(
            "learner.parallel.expert_tensor", fallback, *([expert_key] if expert_key in draft.settings else []), dense
        )


def _precision(draft: Draft) -> None:
    """Megatron's passes compute in its own dtype, FSDP's in `dtype` whatever `model_dtype` holds the weights in."""
    own = f"{MEGATRON}.dtype" if text(draft, f"{ACTOR}.strategy") == "megatron" else _FSDP_DTYPE
    key = own if own in draft.settings or f"{MEGATRON}.dtype" not in draft.settings else f"{MEGATRON}.dtype"
    value = text(draft, key) or "bfloat16"
    if value not in _DTYPES:
        raise NeedsDecisionError(key, f"{value}: float32, bfloat16 and float16")
    draft.put("learner.dtype", _DTYPES[value], key)
    for idle in (_FSDP_DTYPE, f"{MEGATRON}.dtype"):
        if idle != key:
            draft.miss(idle, "not read by the learner that is named")


def _replay(draft: Draft) -> None:
    """The mode stands under the actor, or under the engine that replays."""
    keys = [f"{place}.router_replay.mode" for place in (ACTOR, MEGATRON, f"{ACTOR}.veomni")]
    modes = {key: draft.take(key) for key in keys}
    on = {key: mode for key, mode in modes.items() if mode not in (None, "disabled")}
    present_keys = [key for key in keys if key in draft.settings] or keys[:1]
    if any(mode not in ("R2", "R3") for mode in on.values()) or len(set(on.values())) > 1:
        raise NeedsDecisionError(next(iter(on)), f"which of R2 and R3 is meant: {', '.join(map(str, on.values()))}")
    switched = f"{ROLLOUT}.enable_rollout_routing_replay"
    recorded = switch(draft, switched)
    mode = next(iter(on.values()), "none")
    if mode == "R3" and not recorded:
        draft.remark(f"R3 without {switched}: verl would have had no routes to replay; here R3 records them by itself")
    if recorded:
        present_keys.append(switched)
    draft.put("replay.mode", mode, *present_keys)


def _filtered(draft: Draft) -> None:
    key = "algorithm.filter_groups.enable"
    if draft.take(key) is None:
        return
    draft.put("batch.zero_variance", "drop" if switch(draft, key) else "keep", key)
    if switch(draft, key):
        metric = text(draft, "algorithm.filter_groups.metric")
        if metric not in (None, "seq_reward", "seq_final_reward", "acc", "score"):
            raise NeedsDecisionError("algorithm.filter_groups.metric", f"{metric}: groups are compared by reward here")
        draft.miss("algorithm.filter_groups.metric", "groups are compared by their reward here")
        draft.miss("algorithm.filter_groups.max_num_gen_batches", "the bound here is batch.refill_limit")


def _colocated(draft: Draft) -> None:
    key = "actor_rollout_ref.hybrid_engine"
    draft.put("rollout.colocate", switch(draft, key), key)


def _lora(draft: Draft) -> None:
    key = f"{MODEL}.lora_rank"
    rank = integer(draft, key)
    if not rank:
        for name in ("lora_rank", "lora_alpha", "target_modules", "exclude_modules"):
            draft.miss(f"{MODEL}.{name}", "no adapters: the weights themselves train")
        return
    draft.put("learner.lora.rank", rank, key)
    draft.put("learner.lora.alpha", number(draft, f"{MODEL}.lora_alpha"), f"{MODEL}.lora_alpha")


def _targets(draft: Draft) -> None:
    """verl's megatron-bridge form (`actor_rollout_ref.model.lora`) names modules as Megatron does, and is left open."""
    key, excluded = f"{MODEL}.target_modules", f"{MODEL}.exclude_modules"
    if not draft.take(f"{MODEL}.lora_rank"):
        return
    if draft.take(excluded):
        raise NeedsDecisionError(excluded, "write the modules that have adapters: learner.lora.targets")
    draft.miss(excluded, "nothing is excluded")
    names = draft.take(key)
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise NeedsDecisionError(
            key,
            f"{names}: which matrices that is depends on the version of transformers, whose experts are linear layers "
            "or stacked tensors; choose learner.lora.targets (docs/lora.md)",
        )
    draft.put("learner.lora.targets", names, key)


_RULES: Sequence[Rule] = (
    Rule(("--config-name", "--config-path", "--config-dir"), (), _base),
    _files("data.train_files", "task.prompts"),
    _files("data.val_files", "task.eval_prompts", "task.eval_sets"),
    Rule(("data.prompt_key",), ("task.prompt_field",), _task),
    top_k(f"{ROLLOUT}.top_k"),
    full_vocabulary((f"{ROLLOUT}.top_p", f"{ROLLOUT}.top_k")),
    Rule((f"{ACTOR}.strategy",), ("learner.backend",), _strategy),
    Rule((f"{OPTIM}.lr_warmup_steps", f"{OPTIM}.lr_warmup_steps_ratio"), ("optimizer.warmup_steps",), _warmup),
    pair(f"{OPTIM}.betas"),
    Rule(
        tuple(
            f"{OPTIM}.{name}"
            for name in (
                "lr_decay_style",
                "lr_scheduler_type",
                "lr_wsd_decay_steps",
                "lr_wsd_decay_style",
                "min_lr_ratio",
            )
        ),
        ("optimizer.schedule", "optimizer.final_steps", "optimizer.min_lr"),
        _schedule,
    ),
    direct(f"{OPTIM}.min_lr", "optimizer.min_lr", number),
    Rule(
        (f"{MEGATRON}.expert_tensor_parallel_size", f"{MEGATRON}.tensor_model_parallel_size"),
        ("learner.parallel.expert_tensor",),
        _expert_tensor,
    ),
    Rule(
        ("algorithm.adv_estimator", "algorithm.norm_adv_by_std_in_grpo"),
        ("advantage.name", "advantage.normalize_std"),
        _advantage,
    ),
    Rule(("data.train_batch_size", f"{ACTOR}.ppo_mini_batch_size"), ("learner.minibatches",), _batches),
    Rule(
        (f"{ACTOR}.use_dynamic_bsz", f"{ACTOR}.ppo_max_token_len_per_gpu", f"{ACTOR}.ppo_micro_batch_size_per_gpu"),
        ("learner.micro_batch_tokens", "learner.micro_batch_rows"),
        _micro_batches,
    ),
    Rule((_UNPADDED,), ("batch.layout",), _layout),
    router_losses(
        f"{_TRANSFORMER}.moe_aux_loss_coeff",
        f"{_TRANSFORMER}.moe_z_loss_coeff",
        f"{_TRANSFORMER}.moe_router_load_balancing_type",
        number,
        text,
    ),
    fp8(
        f"{_TRANSFORMER}.fp8",
        f"{_TRANSFORMER}.fp8_recipe",
        tuple(f"{_TRANSFORMER}.{name}" for name in BFLOAT16_LAYERS),
        text,
    ),
    Rule((f"{ACTOR}.strategy", f"{MEGATRON}.dtype", _FSDP_DTYPE), ("learner.dtype",), _precision),
    Rule(_PICTURES, (), _pictures),
    Rule((f"{OPTIM}.clip_grad", f"{ACTOR}.grad_clip", f"{ACTOR}.strategy"), ("optimizer.max_grad_norm",), _clipped),
    Rule(
        (
            *(f"{place}.router_replay.mode" for place in (ACTOR, MEGATRON, f"{ACTOR}.veomni")),
            f"{ROLLOUT}.enable_rollout_routing_replay",
        ),
        ("replay.mode",),
        _replay,
    ),
    Rule(
        tuple(f"algorithm.filter_groups.{name}" for name in ("enable", "metric", "max_num_gen_batches")),
        ("batch.zero_variance",),
        _filtered,
    ),
    Rule(("actor_rollout_ref.hybrid_engine",), ("rollout.colocate",), _colocated),
    Rule((f"{MODEL}.lora_rank", f"{MODEL}.lora_alpha"), ("learner.lora.rank", "learner.lora.alpha"), _lora),
    Rule(
        (f"{MODEL}.lora_rank", f"{MODEL}.target_modules", f"{MODEL}.exclude_modules"),
        ("learner.lora.targets",),
        _targets,
    ),
)
