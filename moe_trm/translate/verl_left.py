"""Reasons for verl's settings that have no counterpart here."""

from __future__ import annotations

import re
from collections.abc import Sequence

from moe_trm.translate.foreign_setting import ForeignSetting

_OFF = (None, False, 0, -1, "", "disabled", "none", "null")

_CHANGES: Sequence[tuple[str, str]] = (
    (
        r".*\.lora(\.(rank|alpha|target_modules|adapter_path|dropout)|_adapter_path)",
        "choose learner.lora: rank, alpha, targets by Hugging Face names, and adapter to start from (docs/lora.md)",
    ),
    (r".*\.(mtp|qat)\.enable(_train|_rollout)?", "not available here"),
    (r"algorithm\.(gamma|lam)", "there is no critic here, and rewards are of whole answers"),
    (
        r"distillation\.enabled?",
        "to distil on policy here set kl.teacher, kl.where=advantage, kl.estimator=k1 and kl.coef (docs/training.md)",
    ),
    (r"algorithm\.use_pf_ppo|trainer\.critic_warmup", "not available here"),
    (r"(reward\.)?reward_model\.enable(_\w+)?", "a reward model is called by your reward function (docs/tasks.md)"),
    (
        r"(reward\.)?reward_manager.*|reward_model\.(reward_manager|overlong_buffer\..*|reward_kwargs\..*)",
        "how verl makes a reward of a score: write it into your reward function (docs/tasks.md)",
    ),
    (
        r"reward\.reward_kwargs\..*|reward\.custom_reward_function\.reward_kwargs.*|custom_reward_function\..*",
        "arguments of verl's reward: write them into your reward function (docs/tasks.md)",
    ),
    (
        r"async_training\..*|rollout\.(nnodes|n_gpus_per_node|total_rollout_steps|n|test_freq)",
        "asynchronous training: choose pipeline.mode, max_staleness and push_every (docs/pipeline.md)",
    ),
    (r"actor_rollout_ref\.actor\.freeze_\w+", "only routers can be frozen here: learner.freeze_router"),
    (r"data\.gen_batch_size", "prompts are issued as they are needed: batch.refill_limit bounds them"),
    (
        r"algorithm\.rollout_is(_\w+)?|.*\.tis_imp_ratio_cap",
        "of an older verl: write it as algorithm.rollout_correction, and translate that",
    ),
    (
        r".*\.override_optimizer_config\.(use_precision_aware_optimizer|optimizer_offload_fraction|overlap_cpu\w+)",
        "learner.offload_optimizer is on or off, and sets the rest",
    ),
    (r".*\.optim\.(optimizer|override_optimizer_config\..*|optimizer_impl)", "the optimizer here is AdamW"),
    (r"actor_rollout_ref\.actor\.ppo_micro_batch_size", "of all ranks together: give it for one rank"),
    (r"trainer\.(resume_from_path|load_checkpoint_path)", "checkpoints of verl cannot be read; export the weights"),
)
"""Features that would change the training: they need a decision where they are on."""

_LEFT: Sequence[tuple[str, str]] = (
    (r".*(profil|nsys|torch_memory|precision_debugger).*|trainer\.npu_profile.*", "profiling"),
    (r"(reward|reward_model|custom_reward_function|sandbox_fusion)\..*", "verl's own reward machinery"),
    (r"(ray_kwargs|ray_init|transfer_queue|hydra|skip|distillation|async_training)\..*", "verl's own machinery"),
    (r"model_engine|.*@.*|defaults.*", "the parts of verl that Hydra puts together"),
    (r"data\.(max_prompt_length|filter_overlong_prompts.*|truncation)", "prompts are never cut off here"),
    (r"data\..*", "how verl loads its data; prompts are files here (docs/tasks.md)"),
    (r"actor_rollout_ref\.rollout\.name", "SGLang rolls out here"),
    (r"actor_rollout_ref\.rollout\.engine_kwargs\..*", "arguments of the engine go to rollout.server.extra_args here"),
    (r"actor_rollout_ref\.rollout\.(multi_turn|agent|trace)\..*", "turns are a function here: rollout.function"),
    (r"actor_rollout_ref\.rollout\.log_prob.*", "the learner scores in its own micro-batches"),
    (r"actor_rollout_ref\.rollout\..*", "how verl runs its engine; the server here is described in rollout.server"),
    (r"actor_rollout_ref\.model\..*", "how verl loads the model; the engines here read its config.json"),
    (r"actor_rollout_ref\.actor\.checkpoint\..*", "a checkpoint here has the whole state of a run"),
    (
        r"actor_rollout_ref\.actor\.(megatron|fsdp_config|veomni|torchtitan|mindspeed\w*)\..*",
        "how verl's engine places and computes; ours is described in `learner`",
    ),
    (r"actor_rollout_ref\.actor\.optim\..*", "verl's optimizer alone has it"),
    (r"actor_rollout_ref\.actor\..*", "how verl's actor computes; ours is described in `learner`"),
    (r"actor_rollout_ref\.(nccl_timeout|hybrid_engine)", "verl's own machinery"),
    (r"trainer\..*", "verl's own machinery"),
    (r"algorithm\..*", "verl's algorithm alone has it"),
    (r"global_profiler\..*|\+?ray_init\..*|rollout\..*", "verl's own machinery"),
)

_NEVER = r".*_target_|critic\..*|actor_rollout_ref\.ref\..*|distillation\.(?!enabled?$).*|.*profil.*"
"""Sections that nothing here reads, whatever they say."""


def reason_of(key: str, setting: ForeignSetting) -> tuple[str, bool]:
    """The reason that this setting is not translated, and whether somebody has to decide about it."""
    if re.fullmatch(_NEVER, key):
        return "the learner scores the reference itself, and there is no critic here", False
    for pattern, reason in _CHANGES:
        if re.fullmatch(pattern, key):
            if setting.unread:
                return f"{setting.unread}; {reason}", True
            return (reason, True) if not _harmless(key, setting.value) else ("off, or verl's default", False)
    if key.startswith(("$", "`")):
        return setting.unread, key not in ("$@", "$*", "${@}", "${*}")
    for pattern, reason in _LEFT:
        if re.fullmatch(pattern, key):
            return reason, False
    return (setting.unread, True) if setting.unread else ("unknown to this translator", False)


def _harmless(key: str, value: object) -> bool:
    if isinstance(value, (list, dict)):
        return not value
    defaults = {"gamma": 1.0, "lam": 1.0, "optimizer": ("adam", "AdamW"), "optimizer_impl": ("torch.optim",)}
    name = key.rpartition(".")[2]
    if name in defaults:
        known = defaults[name]
        return value in known if isinstance(known, tuple) else value == known
    if name in ("reward_manager", "name", "source", "num_workers"):
        return value in ("naive", "register", "custom_reward_manager", "compute_score", 8, None)
    return value in _OFF
