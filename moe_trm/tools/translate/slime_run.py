"""The rest of a slime run in our settings: task, evaluation, pipeline, checkpoints and trackers."""

from __future__ import annotations

from collections.abc import Sequence

from moe_trm.tools.translate.draft import Draft
from moe_trm.tools.translate.foreign_setting import NeedsDecisionError
from moe_trm.tools.translate.values import Rule, top_k
from moe_trm.tools.translate.words import flag, integer, number, on, word, wordly, words

_TRACKERS = {"use-wandb": "wandb", "use-tensorboard": "tensorboard", "use-mlflow": "mlflow"}


def _task(draft: Draft) -> None:
    if "prompt-data" not in draft.settings:
        return
    draft.put("task.name", "jsonl")
    draft.origins["task.name"] = "slime reads its prompts from files"
    draft.read("task.prompt_field", word, "input-key")
    prompts = word(draft, "prompt-data") or ""
    if "@[" in prompts:
        raise NeedsDecisionError("prompt-data", f"{prompts}: a part of a file; write that part into a file")
    draft.put("task.prompts", prompts, "prompt-data")


def _reward(draft: Draft) -> None:
    """A function of slime's takes other arguments, and its graders are its own."""
    function, kind = word(draft, "custom-rm-path"), word(draft, "rm-type")
    if function is not None:
        raise NeedsDecisionError("custom-rm-path", f"{function} takes other arguments: write it as in docs/tasks.md")
    if kind is not None:
        raise NeedsDecisionError("rm-type", f"{kind}: slime's own grader; math_verify, or a reward of yours")


_OWN = ("sglang_rollout.generate_rollout", "sglang_rollout.generate")
"""Functions of slime and miles that do what is done here without a function."""


def _keeps_sampling(function: str) -> bool:
    return "async" in function


def _rollout_function(draft: Draft) -> None:
    for key in ("custom-generate-function-path", "rollout-function-path"):
        function = word(draft, key)
        if key == "rollout-function-path" and function is not None and _keeps_sampling(function):
            continue
        if function is not None and function.startswith(("slime.", "miles.")) and function.endswith(_OWN):
            draft.miss(key, "the framework's own function, which samples one answer to each prompt as here")
        elif function is not None:
            raise NeedsDecisionError(key, f"{function} takes other arguments: write it as in docs/tasks.md")


def _evaluation(draft: Draft) -> None:
    """`--eval-prompt-data NAME PATH [NAME PATH ...]`: sets keep their names."""
    sets = words(draft, "eval-prompt-data")
    if sets is None:
        return
    named = dict(zip(sets[::2], sets[1::2], strict=False))
    if len(sets) % 2 or 2 * len(named) != len(sets) or any("@[" in path for path in named.values()):
        raise NeedsDecisionError("eval-prompt-data", f"{' '.join(sets)}: NAME PATH pairs of whole files are expected")
    draft.put("task.eval_sets", named, "eval-prompt-data")
    draft.remark("all held-out prompts are evaluated there; here the first task.eval_size of them")


def _sampled_evaluation(draft: Draft) -> None:
    """slime samples its evaluation at `--eval-temperature`, or at the rollout's."""
    if "eval-prompt-data" not in draft.settings:
        return
    draft.put("eval.samples", integer(draft, "n-samples-per-eval-prompt"), "n-samples-per-eval-prompt")
    for name, ours in (("temperature", "eval.temperature"), ("top-p", "eval.top_p")):
        key = next((key for key in (f"eval-{name}", f"rollout-{name}") if key in draft.settings), None)
        if key is not None:
            draft.put(ours, number(draft, key), key)
    if draft.values.get("eval.temperature") == 0:
        for ours in ("eval.temperature", "eval.samples"):
            draft.values.pop(ours)
        draft.remark("--eval-temperature 0 is greedy, as our evaluation without eval.samples")


def _filtered(draft: Draft) -> None:
    key = "dynamic-sampling-filter-path"
    name = word(draft, key)
    if name is None:
        return
    if name.rpartition(".")[2] != "check_reward_nonzero_std":
        raise NeedsDecisionError(key, f"{name}: only groups without variance can be dropped (batch.zero_variance)")
    draft.put("batch.zero_variance", "drop", key)
    draft.miss("over-sampling-batch-size", "prompts asked for at once; the bound here is batch.refill_limit")


def _pipeline(draft: Draft) -> None:
    program, function = word(draft, "train.py"), word(draft, "rollout-function-path")
    if function is not None and _keeps_sampling(function):
        raise NeedsDecisionError(
            "rollout-function-path",
            f"{function} samples on while the learner trains: choose pipeline.mode=async, pipeline.max_staleness and "
            "pipeline.push_every (docs/pipeline.md)",
        )
    if program is not None:
        one_step = program.endswith("train_async.py")
        draft.put("pipeline.mode", "one_step" if one_step else "sync", "train.py")
    if on(draft, "colocate"):
        draft.put("rollout.colocate", True, "colocate")
    if on(draft, "partial-rollout"):
        draft.values.pop("pipeline.mode", None)
        raise NeedsDecisionError(
            "partial-rollout", "unfinished answers go on in a later step: pipeline.mode=async, partial=interrupt"
        )


def _saving(draft: Draft) -> None:
    interval = integer(draft, "save-interval")
    draft.put("checkpoint.every", interval or 0, "save-interval")
    if (folder := word(draft, "save")) is not None:
        draft.put("checkpoint.dir", folder, "save")


def _tracking(draft: Draft) -> None:
    used = {flag: name for flag, name in _TRACKERS.items() if on(draft, flag)}
    if used:
        draft.put("observe.sinks", list(used.values()), *used)
    if (project := word(draft, "wandb-project")) is not None and "use-wandb" in used:
        draft.put("observe.project", project, "wandb-project")
    if (group := word(draft, "wandb-group")) is not None and "use-wandb" in used:
        draft.miss("wandb-group", f"{group}: runs are called by `name` here")


def _length(draft: Draft) -> None:
    if "num-rollout" in draft.settings:
        draft.miss("num-epoch", "no effect with --num-rollout")
    else:
        raise NeedsDecisionError("num-epoch", "runs are counted in steps here: write train.steps")


RUN: Sequence[Rule] = (
    Rule(("prompt-data", "input-key"), ("task.prompts",), _task),
    wordly("apply-chat-template", "task.chat", flag),
    Rule(("custom-rm-path", "rm-type"), ("task.reward",), _reward),
    Rule(
        ("train.py", "rollout-function-path", "colocate", "partial-rollout"),
        ("pipeline.mode", "rollout.colocate"),
        _pipeline,
    ),
    Rule(("custom-generate-function-path", "rollout-function-path"), ("rollout.function",), _rollout_function),
    Rule(("eval-prompt-data",), ("task.eval_sets",), _evaluation),
    Rule(
        ("n-samples-per-eval-prompt", "eval-temperature", "eval-top-p"),
        ("eval.samples", "eval.temperature", "eval.top_p"),
        _sampled_evaluation,
    ),
    top_k("rollout-top-k", integer),
    Rule(("dynamic-sampling-filter-path", "over-sampling-batch-size"), ("batch.zero_variance",), _filtered),
    Rule(("save-interval", "save"), ("checkpoint.every", "checkpoint.dir"), _saving),
    Rule((*_TRACKERS, "wandb-project", "wandb-group"), ("observe.sinks", "observe.project"), _tracking),
    Rule(("num-epoch",), ("train.steps",), _length),
)
