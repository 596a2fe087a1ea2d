"""slime's command line (or a launch script that holds it) in our configuration. Flags as in slime of August 2026."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_trm.config.translate.draft import Draft
from moe_trm.config.translate.verl import SCHEDULES
from moe_trm.config.translate.verl_correction import kl_estimator
from moe_trm.config.translate.words import script_words, unread

DEFAULTS: Mapping[str, str] = {
    "n-samples-per-prompt": "1",
    "lr": "1e-6",
    "advantage-estimator": "grpo",
    "eps-clip": "0.2",
    "seed": "1234",
}
"""slime's defaults where we would use something else."""

_NUMBERS: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "num-rollout": ("train.steps", int),
    "rollout-batch-size": ("rollout.prompts_per_step", int),
    "n-samples-per-prompt": ("rollout.group_size", int),
    "rollout-max-response-len": ("rollout.max_new_tokens", int),
    "rollout-temperature": ("rollout.temperature", float),
    "rollout-top-p": ("rollout.top_p", float),
    "rollout-num-gpus-per-engine": ("rollout.server.tensor_parallel", int),
    "sglang-max-running-requests": ("rollout.server.max_running_requests", int),
    "sglang-chunked-prefill-size": ("rollout.server.chunked_prefill_size", int),
    "seed": ("seed", int),
    "eval-interval": ("train.eval_every", int),
    "tensor-model-parallel-size": ("learner.parallel.tensor", int),
    "pipeline-model-parallel-size": ("learner.parallel.pipeline", int),
    "context-parallel-size": ("learner.parallel.context", int),
    "expert-model-parallel-size": ("learner.parallel.expert", int),
    "expert-tensor-parallel-size": ("learner.parallel.expert_tensor", int),
    "lr": ("optimizer.lr", float),
    "weight-decay": ("optimizer.weight_decay", float),
    "adam-eps": ("optimizer.eps", float),
    "clip-grad": ("optimizer.max_grad_norm", float),
    "lr-warmup-iters": ("optimizer.warmup_steps", int),
    "min-lr": ("optimizer.min_lr", float),
    "lr-decay-iters": ("optimizer.decay_steps", int),
    "n-samples-per-eval-prompt": ("eval.samples", int),
    "eval-temperature": ("eval.temperature", float),
    "eval-top-p": ("eval.top_p", float),
    "eval-max-response-len": ("eval.max_new_tokens", int),
    "entropy-coef": ("loss.entropy_coef", float),
    "eps-clip": ("loss.clip_low", float),
    "eps-clip-high": ("loss.clip_high", float),
    "eps-clip-c": ("loss.dual_clip", float),
    "initial-loss-scale": ("learner.loss_scale.initial", int),
    "loss-scale-window": ("learner.loss_scale.growth_steps", int),
}
_TEXTS: Mapping[str, str] = {
    "hf-checkpoint": "model.checkpoint",
    "prompt-data": "task.prompts",
    "input-key": "task.prompt_field",
    "label-key": "task.answer_field",
    "custom-rm-path": "task.reward",
    "recompute-granularity": "learner.recompute",
    "custom-generate-function-path": "rollout.function",
    "sglang-dtype": "rollout.server.dtype",
    "sglang-quantization": "rollout.quantization",
}
_ADVANTAGES: Mapping[str, tuple[str, str]] = {
    "grpo": ("grpo", "ppo_clip"),
    "gspo": ("grpo", "gspo"),
    "cispo": ("grpo", "cispo"),
    "reinforce_plus_plus": ("reinforce_plus_plus", "ppo_clip"),
    "reinforce_plus_plus_baseline": ("reinforce_plus_plus_baseline", "ppo_clip"),
}
"""slime's estimator names an advantage and sometimes a loss."""

_MATH_REWARDS = ("math", "deepscaler", "dapo")

_DEFAULT_HERE = (
    "balance-data",
    "sequence-parallel",
    "rollout-shuffle",
    "accumulate-allreduce-grads-in-fp32",
    "attention-softmax-in-fp32",
    "optimizer",
)
"""Settings that are always so here and need no equivalent."""

_MACHINERY = (
    "actor-num",
    "rollout-num-gpus",
    "num-gpus",
    "offload",
    "train-env",
    "overlap-",
    "use-precision",
    "ray-",
    "attention-",
)


_TRACKERS = {"use-wandb": "wandb", "use-tensorboard": "tensorboard"}

_OTHER_PROGRAMS = ("ray", "pkill", "pip", "python", "python3", "source", "nvidia-smi")


def from_slime(path: Path | None, words: Sequence[str] = ()) -> Draft:
    """Translate slime's flags, from a script, from `words`, or both (the latter win).

    Raises:
        ConfigError: the script cannot be read.
    """
    draft = Draft()
    flags = _flags([*(script_words(path) if path else []), *words], draft)
    return translate(flags, draft)


def translate(flags: Mapping[str, Sequence[str]], draft: Draft) -> Draft:
    """Translate flags (without the dashes, each with its values) into `draft`."""
    settings = {**{flag: [value] for flag, value in DEFAULTS.items() if flag not in flags}, **flags}
    used: set[str] = set()

    def take(flag: str) -> str | None:
        used.add(flag)
        values = settings.get(flag)
        return None if values is None else (values[0] if values else "")

    def origin(flag: str) -> str:
        return f"--{flag}" if flag in flags else f"--{flag} (slime's default)"

    for flag, (key, convert) in _NUMBERS.items():
        value = take(flag)
        if value:
            _number(draft, key, convert, value, origin(flag))
    for flag, key in _TEXTS.items():
        draft.put(key, take(flag), origin(flag))
    if "loss.clip_low" in draft.values and "loss.clip_high" not in draft.values:
        draft.put("loss.clip_high", draft.values["loss.clip_low"], origin("eps-clip"))
    _loss(draft, take)
    _batches(draft, take)
    _precision(draft, take)
    _task(draft, take)
    used.add("eval-prompt-data")
    _evaluation(draft, flags.get("eval-prompt-data", ()))
    _sampling(draft, take)
    _replay_and_correction(draft, take)
    _betas(draft, take)
    _kl(draft, take)
    _keeping(draft, take)
    for flag in flags:
        if flag not in used:
            _leave(draft, flag)
    return draft


def _number(draft: Draft, key: str, convert: Callable[[str], Any], value: str, origin: str) -> None:
    try:
        draft.put(key, convert(value), origin)
    except ValueError:
        draft.miss(origin, f"not a number: {value}")


def _loss(draft: Draft, take: Callable[[str], str | None]) -> None:
    name = take("advantage-estimator") or "grpo"
    if name not in _ADVANTAGES:
        draft.miss("--advantage-estimator", f"{name}: there is no critic here; grpo is used")
        return
    advantage, loss = _ADVANTAGES[name]
    draft.put("advantage.name", advantage, "--advantage-estimator")
    draft.put("loss.name", loss, "--advantage-estimator")
    if take("disable-grpo-std-normalization") is not None:
        draft.put("advantage.normalize_std", False, "--disable-grpo-std-normalization")
    if take("calculate-per-token-loss") is None:
        draft.put("loss.aggregation", "seq-mean-token-mean", "slime's default without --calculate-per-token-loss")
    else:
        draft.put("loss.aggregation", "token-mean", "--calculate-per-token-loss")


def _batches(draft: Draft, take: Callable[[str], str | None]) -> None:
    rows, steps = take("global-batch-size"), take("num-steps-per-rollout")
    sampled = draft.values.get("rollout.prompts_per_step", 0) * draft.values.get("rollout.group_size", 1)
    if steps:
        _number(draft, "learner.minibatches", int, steps, "--num-steps-per-rollout")
    elif rows and rows.isdigit() and sampled:
        if sampled % int(rows):
            draft.miss("--global-batch-size", f"{sampled} samples of a step do not split into batches of {rows}")
        else:
            draft.put("learner.minibatches", sampled // int(rows), "--global-batch-size")
    budget, micro = take("max-tokens-per-gpu"), take("micro-batch-size")
    if take("use-dynamic-batch-size") is not None and budget:
        _number(draft, "learner.micro_batch_tokens", int, budget, "--max-tokens-per-gpu")
    elif micro:
        _number(draft, "learner.micro_batch_rows", int, micro, "--micro-batch-size")


def _precision(draft: Draft, take: Callable[[str], str | None]) -> None:
    for flag, dtype in (("bf16", "bfloat16"), ("fp16", "float16")):
        if take(flag) is not None:
            draft.put("learner.dtype", dtype, f"--{flag}")
    recipe, number_format = take("fp8-recipe"), take("fp8-format")
    if number_format:
        draft.put("learner.fp8", recipe or "delayed", "--fp8-recipe")
    if take("transformer-impl") == "local":
        draft.put("learner.transformer_engine", "off", "--transformer-impl")


def _task(draft: Draft, take: Callable[[str], str | None]) -> None:
    if "task.prompts" in draft.values:
        draft.put("task.name", "jsonl", "--prompt-data")
    if take("apply-chat-template") is not None:
        draft.put("task.chat", True, "--apply-chat-template")
    kind = take("rm-type")
    if kind in _MATH_REWARDS:
        draft.put("task.reward", "math_verify", "--rm-type")
    elif kind:
        draft.miss("--rm-type", f"{kind}: give a function in task.reward (docs/tasks.md)")
    if "task.reward" in draft.values and take("custom-rm-path"):
        draft.put("task.reward", _function(str(draft.values["task.reward"])), "--custom-rm-path")
        draft.remark("the reward function's arguments differ: see docs/tasks.md")
    if "rollout.function" in draft.values:
        draft.put("rollout.function", _function(draft.values["rollout.function"]), "--custom-generate-function-path")
        draft.remark("the rollout function's arguments differ: see docs/tasks.md")


def _evaluation(draft: Draft, sets: Sequence[str]) -> None:
    """`--eval-prompt-data NAME PATH [NAME PATH ...]`: one set is the held-out prompts, several keep their names."""
    named = dict(zip(sets[::2], sets[1::2], strict=False))
    if len(named) == 1:
        draft.put("task.eval_prompts", sets[1], "--eval-prompt-data")
    elif named:
        draft.put("task.eval_sets", named, "--eval-prompt-data")


def _sampling(draft: Draft, take: Callable[[str], str | None]) -> None:
    """Dynamic sampling, over-sampling, partial rollouts, shared GPUs."""
    filtered, more = take("dynamic-sampling-filter-path"), take("over-sampling-batch-size")
    if filtered and "nonzero_std" in filtered:
        draft.put("batch.zero_variance", "drop", "--dynamic-sampling-filter-path")
    elif filtered:
        draft.miss(
            "--dynamic-sampling-filter-path", f"{filtered}: only groups without variance can be filtered by config"
        )
    prompts = draft.values.get("rollout.prompts_per_step")
    if more and more.isdigit() and prompts:
        draft.put("batch.refill_limit", max(1.0, int(more) / prompts), "--over-sampling-batch-size")
    if take("colocate") is not None:
        draft.put("rollout.colocate", True, "--colocate")
    if take("partial-rollout") is not None:
        draft.put("pipeline.mode", "async", "--partial-rollout")
        draft.put("pipeline.partial", "interrupt", "--partial-rollout")
    style = take("lr-decay-style")
    if style in SCHEDULES:
        draft.put("optimizer.schedule", SCHEDULES[style], "--lr-decay-style")
    elif style:
        draft.miss("--lr-decay-style", f"{style}: not a schedule of ours")


def _function(path: str) -> str:
    """slime's `package.module.function` as ours, `package.module:function`."""
    module, _, name = path.rpartition(".")
    return f"{module}:{name}"


def _replay_and_correction(draft: Draft, take: Callable[[str], str | None]) -> None:
    if take("use-rollout-routing-replay") is not None:
        draft.put("replay.mode", "R3", "--use-rollout-routing-replay")
    elif take("use-routing-replay") is not None:
        draft.put("replay.mode", "R2", "--use-routing-replay")
    else:
        draft.put("replay.mode", "none", "slime's default")
    take("use-routing-replay")
    rules: list[dict[str, Any]] = []
    cap, low = take("tis-clip"), take("tis-clip-low")
    if take("use-tis") is not None:
        rules.append({"name": "token_tis", "thresholds": {"cap": float(cap or 2.0), "ratio": "merged"}})
        if low and float(low) > 0:
            draft.miss("--tis-clip-low", "token_tis has no lower bound; icepop rejects below one")
    delta = take("opsm-delta")
    if take("use-opsm") is not None:
        rules.append({"name": "opsm", "thresholds": {"delta": float(delta or 1e-4)}})
        draft.remark("opsm rejects whole sequences here, as published; slime (as of August 2026) masks single tokens")
    if rules:
        draft.put("correction.rules", rules, "--use-tis, --use-opsm")
    if take("use-rollout-logprobs") is not None:
        draft.put("loss.parameters", {"ratio": "total"}, "--use-rollout-logprobs")
        draft.remark("the loss clips the total ratio, current over rollout (bypass), as --use-rollout-logprobs does")


def _betas(draft: Draft, take: Callable[[str], str | None]) -> None:
    first, second = take("adam-beta1"), take("adam-beta2")
    if first or second:
        draft.put("optimizer.betas", [float(first or 0.9), float(second or 0.999)], "--adam-beta1, --adam-beta2")


def _kl(draft: Draft, take: Callable[[str], str | None]) -> None:
    coef, kind, in_reward = take("kl-loss-coef"), take("kl-loss-type"), take("kl-coef")
    unbiased = take("use-unbiased-kl") is not None
    if take("use-kl-loss") is not None:
        _number(draft, "kl.coef", float, coef or "0", "--kl-loss-coef")
        draft.put("kl.estimator", "k3_is" if unbiased else kl_estimator(kind or "k1"), "--kl-loss-type")
    elif in_reward and float(in_reward) > 0:
        draft.put("kl.where", "reward", "--kl-coef")
        _number(draft, "kl.coef", float, in_reward, "--kl-coef")
        draft.put("kl.estimator", kl_estimator(kind or "k1"), "--kl-loss-type")


def _keeping(draft: Draft, take: Callable[[str], str | None]) -> None:
    every = take("save-interval")
    if every:
        _number(draft, "checkpoint.every", int, every, "--save-interval")
    draft.put("checkpoint.dir", take("save"), "--save")
    trackers = [name for flag, name in _TRACKERS.items() if take(flag) is not None]
    if trackers:
        draft.put("observe.sinks", trackers, "--use-wandb, --use-tensorboard")


def _leave(draft: Draft, flag: str) -> None:
    if flag in _DEFAULT_HERE:
        return
    if flag.startswith(_MACHINERY):
        draft.miss(
            f"--{flag}", "placement and kernels are the launcher's and the engines' here (README, Many machines)"
        )
    else:
        draft.miss(f"--{flag}", "no equivalent")


def _flags(words: Sequence[str], draft: Draft) -> dict[str, list[str]]:
    """`--flag value ...` words as a mapping.

    In a script, those of its arrays and of `train.py`; other programs' are not slime's.
    """
    flags: dict[str, list[str]] = {}
    current: list[str] | None = None
    foreign = False
    for word in words:
        if word in _OTHER_PROGRAMS:
            foreign, current = True, None
        elif word.endswith(("=", "train.py", "train_async.py")):
            foreign, current = False, None
        elif foreign or word.endswith("[@]}"):  # an array, whose words were read where it was written
            continue
        elif word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            current = flags.setdefault(name, [])
            current[:] = [value] if equals else []
        elif current is not None:
            current.append(word)
    for name in [name for name, values in flags.items() if any(unread(value) for value in values[:1])]:
        draft.miss(f"--{name}", f"the script computes it: {flags.pop(name)[0]}")
    return flags
