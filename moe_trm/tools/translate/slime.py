"""slime's and miles's arguments in ours. Flags and defaults as in both of August 2026, Megatron's among them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from moe_trm.errors import ConfigError
from moe_trm.tools.translate.draft import Draft
from moe_trm.tools.translate.foreign_setting import ForeignSetting, NeedsDecisionError
from moe_trm.tools.translate.megatron_fp8 import BFLOAT16_LAYERS, fp8
from moe_trm.tools.translate.router_losses import router_losses
from moe_trm.tools.translate.slime_correction import CORRECTION
from moe_trm.tools.translate.slime_run import RUN
from moe_trm.tools.translate.sources import flag_settings
from moe_trm.tools.translate.tables import Tables
from moe_trm.tools.translate.template_variables import template_variables
from moe_trm.tools.translate.values import MEGATRON_SCHEDULES, Rule, betas, full_vocabulary
from moe_trm.tools.translate.words import flag, integer, number, on, only, word, wordly

TABLES = Tables.read("slime", (integer, number, word, flag), wordly, lists=("slime", "miles"))
DEFAULTS = {key: (value,) for key, value in TABLES.defaults.items()}
"""Flags have tuples of words."""

_LAYOUTS = {"thd": "packed", "bshd": "padded"}
"""Megatron's names of forwarded layouts."""

_ADVANTAGES: Mapping[str, tuple[str, str]] = {
    "grpo": ("grpo", "ppo_clip"),
    "gspo": ("grpo", "gspo"),
    "cispo": ("grpo", "cispo"),
    "reinforce_plus_plus": ("reinforce_plus_plus", "ppo_clip"),
    "reinforce_plus_plus_baseline": ("reinforce_plus_plus_baseline", "ppo_clip"),
}
"""An estimator names an advantage and sometimes a loss."""


def from_slime(path: Path, words: Sequence[str] = ()) -> Draft:
    """Translate slime's arguments: a list of them, or a launch script, with further ones on top.

    Raises:
        ConfigError: the file cannot be read, or has no flag of slime.
    """
    return translate(flag_settings(path, words), "slime", where=str(path))


def from_miles(path: Path, words: Sequence[str] = ()) -> Draft:
    """Translate miles's arguments. As `from_slime`, whose flags it has."""
    return translate(flag_settings(path, words), "miles", where=str(path))


def translate(settings: Mapping[str, ForeignSetting], framework: str = "slime", *, where: str = "arguments") -> Draft:
    """Translate flags without their dashes. Raises `ConfigError` where none is the framework's."""
    if not {"hf-checkpoint", "rollout-batch-size", "prompt-data", "advantage-estimator", "use-tis"} & set(settings):
        raise ConfigError(
            f"these are no arguments of {framework}",
            where=where,
            got=", ".join(f"--{key}" for key in list(settings)[:5]) or "no --flag",
            expected="flags such as --hf-checkpoint and --rollout-batch-size",
            fix="use `moe-trm config from-verl` for verl's YAML and key=value",
        )
    draft = Draft(settings, DEFAULTS, framework, dashes="--")
    variables = template_variables("apply-chat-template-kwargs", settings)
    cut = ("rollout-top-p", "rollout-top-k") if framework == "miles" else ("rollout-top-k",)
    rules = (*_RULES, *CORRECTION, *RUN, variables, full_vocabulary(cut, number))
    return TABLES.settle(TABLES.translate(draft, rules))


def _method(draft: Draft) -> None:
    key = "advantage-estimator"
    name = word(draft, key) or "grpo"
    if name not in _ADVANTAGES:
        names = ", ".join(_ADVANTAGES)
        reason = (
            "there is no critic here" if name == "ppo" else f"not an estimator of this translation, which has {names}"
        )
        raise NeedsDecisionError(key, f"{name}: {reason}")
    advantage, loss = _ADVANTAGES[name]
    draft.put("advantage.name", advantage, key)
    draft.put("loss.name", loss, key)
    total = {"ratio": "total"} if on(draft, "use-rollout-logprobs") else {}
    if total:
        draft.put("loss.parameters", total, "use-rollout-logprobs")
    _clip(draft, loss)
    if on(draft, "disable-grpo-std-normalization"):
        if advantage != "grpo":
            draft.miss("disable-grpo-std-normalization", f"{name} has no such choice")
        else:
            draft.put("advantage.normalize_std", False, "disable-grpo-std-normalization")
    if on(draft, "disable-rewards-normalization"):
        raise NeedsDecisionError("disable-rewards-normalization", "rewards are always compared in their group here")


def _clip(draft: Draft, loss: str) -> None:
    draft.read("loss.clip_low", number, "eps-clip")
    above = "eps-clip-high" if "eps-clip-high" in draft.settings else "eps-clip"
    draft.read("loss.clip_high", number, above)
    if loss == "cispo" and isinstance(low := draft.values["loss.clip_low"], float) and low >= 1:
        del draft.values["loss.clip_low"], draft.origins["loss.clip_low"]
        draft.remark("--eps-clip of 1 or more is no lower bound, as loss.clip_low left out")
    if "eps-clip-c" not in draft.settings:
        return
    if loss == "ppo_clip":
        draft.read("loss.dual_clip", number, "eps-clip-c")
    else:
        draft.decide("eps-clip-c", f"loss {loss} has no bound for negative advantages here")


def _aggregation(draft: Draft) -> None:
    key = "calculate-per-token-loss"
    draft.put("loss.aggregation", "token-mean" if on(draft, key) else "seq-mean-token-mean", key)


def _batches(draft: Draft) -> None:
    if "num-steps-per-rollout" in draft.settings:
        draft.read("learner.minibatches", integer, "num-steps-per-rollout")
        draft.miss("global-batch-size", "slime does not read it with --num-steps-per-rollout")
        return
    keys = ("rollout-batch-size", "n-samples-per-prompt", "global-batch-size")
    prompts, samples, rows = (integer(draft, key) for key in keys)
    if rows is None or prompts is None or samples is None:
        return
    if prompts * samples % rows:
        raise NeedsDecisionError(keys[2], f"{prompts * samples} samples do not split into batches of {rows}")
    draft.put("learner.minibatches", prompts * samples // rows, *keys)


def _offload(draft: Draft) -> None:
    if on(draft, "optimizer-cpu-offload"):
        draft.put("learner.offload_optimizer", True, "optimizer-cpu-offload")
        draft.miss("optimizer-offload-fraction", "all of the state is kept on the host here")
        draft.miss("use-precision-aware-optimizer", "a part of learner.offload_optimizer here")
    elif on(draft, "use-precision-aware-optimizer"):
        raise NeedsDecisionError("use-precision-aware-optimizer", "only a part of learner.offload_optimizer here")


def _micro_batches(draft: Draft) -> None:
    if on(draft, "use-dynamic-batch-size"):
        value = integer(draft, "max-tokens-per-gpu")
        if value is None:
            raise NeedsDecisionError("use-dynamic-batch-size", "--max-tokens-per-gpu is not given")
        # Ranks that share sequences have one budget together there; whole sequences are counted here.
        context = integer(draft, "context-parallel-size") or 1
        keys = ("max-tokens-per-gpu", "use-dynamic-batch-size", "context-parallel-size")
        draft.put("learner.micro_batch_tokens", value * context, *(keys if context > 1 else keys[:2]))
        draft.miss("micro-batch-size", "no effect with --use-dynamic-batch-size")
    else:
        draft.read("learner.micro_batch_rows", integer, "micro-batch-size")


def _layout(draft: Draft) -> None:
    """`thd` is tokens one after the other, and `--max-tokens-per-gpu` counts them without padding, as ours does."""
    layout = word(draft, "qkv-format")
    if layout not in _LAYOUTS:
        raise NeedsDecisionError("qkv-format", f"{layout}: packs (thd) or padded rows (bshd)")
    draft.put("batch.layout", _LAYOUTS[layout], "qkv-format")


def _precision(draft: Draft) -> None:
    half = on(draft, "fp16")
    draft.put("learner.dtype", "float16" if half else "bfloat16", "fp16" if half else "bf16")
    if word(draft, "transformer-impl") == "local":
        draft.put("learner.transformer_engine", "off", "transformer-impl")
    elif word(draft, "transformer-impl") == "transformer_engine":
        draft.put("learner.transformer_engine", "on", "transformer-impl")


def _schedule(draft: Draft) -> None:
    key = "lr-decay-style"
    style = word(draft, key)
    if style not in MEGATRON_SCHEDULES:
        raise NeedsDecisionError(key, f"{style}: not a schedule of ours")
    draft.put("optimizer.schedule", MEGATRON_SCHEDULES[style], key)
    if "lr-decay-iters" in draft.settings:
        draft.read("optimizer.decay_steps", integer, "lr-decay-iters")
    if "lr-wsd-decay-iters" in draft.settings and style == "WSD":
        draft.read("optimizer.final_steps", integer, "lr-wsd-decay-iters")
    if style == "WSD" and word(draft, "lr-wsd-decay-style") != "linear":
        raise NeedsDecisionError(key, "the way down of `wsd` is linear here, and Megatron's is exponential")


def _warmup(draft: Draft) -> None:
    fraction = number(draft, "lr-warmup-fraction")
    if fraction:
        raise NeedsDecisionError("lr-warmup-fraction", f"warm-up is {fraction} of the decay: write the steps")
    draft.put("optimizer.warmup_steps", integer(draft, "lr-warmup-iters"), "lr-warmup-iters")


def _expert_tensor(draft: Draft) -> None:
    """Megatron-Core takes the tensor-parallel size where the experts' own is not given."""
    expert_key, dense = "expert-tensor-parallel-size", "tensor-model-parallel-size"
    key = expert_key if expert_key in draft.settings else dense
    draft.read("learner.parallel.expert_tensor", integer, key)


_RULES: Sequence[Rule] = (
    Rule(
        ("expert-tensor-parallel-size", "tensor-model-parallel-size"),
        ("learner.parallel.expert_tensor",),
        _expert_tensor,
    ),
    betas(("adam-beta1", "adam-beta2"), number),
    Rule(
        ("lr-decay-style", "lr-decay-iters", "lr-wsd-decay-iters", "lr-wsd-decay-style"),
        ("optimizer.schedule",),
        _schedule,
    ),
    Rule(("lr-warmup-iters", "lr-warmup-fraction"), ("optimizer.warmup_steps",), _warmup),
    Rule(
        ("optimizer-cpu-offload", "optimizer-offload-fraction", "use-precision-aware-optimizer"),
        ("learner.offload_optimizer",),
        _offload,
    ),
    Rule(
        (
            "advantage-estimator",
            "use-rollout-logprobs",
            "eps-clip",
            "eps-clip-high",
            "eps-clip-c",
            "disable-grpo-std-normalization",
            "disable-rewards-normalization",
        ),
        ("advantage.name", "loss.name", "loss.parameters", "loss.clip_low", "loss.clip_high"),
        _method,
    ),
    Rule(("calculate-per-token-loss",), ("loss.aggregation",), _aggregation),
    Rule(
        ("num-steps-per-rollout", "rollout-batch-size", "n-samples-per-prompt", "global-batch-size"),
        ("learner.minibatches",),
        _batches,
    ),
    Rule(
        ("use-dynamic-batch-size", "max-tokens-per-gpu", "micro-batch-size"),
        ("learner.micro_batch_tokens", "learner.micro_batch_rows"),
        _micro_batches,
    ),
    Rule(("qkv-format",), ("batch.layout",), _layout),
    Rule(
        ("fp16", "bf16", "transformer-impl"),
        ("learner.dtype", "learner.transformer_engine"),
        _precision,
    ),
    router_losses("moe-aux-loss-coeff", "moe-z-loss-coeff", "moe-router-load-balancing-type", number, word),
    fp8(
        "fp8-format",
        "fp8-recipe",
        tuple(name.replace("_", "-") for name in BFLOAT16_LAYERS),
        word,
    ),
    only("optimizer", ("adam",), "the optimizer here is AdamW"),
)
