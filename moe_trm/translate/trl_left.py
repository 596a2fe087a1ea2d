"""Settings of TRL that are not translated, and why."""

from __future__ import annotations

import re
from collections.abc import Mapping

from moe_trm.translate.foreign_setting import ForeignSetting

_CHANGES: Mapping[str, tuple[object, str]] = {
    "off_policy_mask_threshold": (
        None,
        "rows of negative advantage that are far off: the rule `opsm` (docs/methods.md)",
    ),
    "top_entropy_quantile": (1.0, "tokens of high entropy alone: there is no such choice here"),
    "sync_ref_model": (False, "the reference stays as it is here"),
    "multi_objective_aggregation": ("sum_then_normalize", "rewards one by one: `advantage.name=gdpo`"),
    "reward_weights": (None, "weights of named rewards: task.reward_weights"),
    "repetition_penalty": (1.0, "log-probs here are those of plain sampling"),
    "generation_kwargs": (None, "sampling here has temperature, top_p, top_k and min_p"),
    "cast_lm_head_to_fp32": (False, "there is no such choice here"),
    "use_liger_kernel": (False, "kernels are chosen by the learner"),
    "disable_dropout": (False, "models train without dropout here"),
    "optim": ("adamw_torch_fused", "the optimizer here is AdamW"),
    "model_init_kwargs": (None, "the engines here read the model's config.json"),
    "chat_template_kwargs": (None, "the tokenizer's own template is used here"),
}
"""By key, the value that changes nothing, and what another one asks for."""
_ADAM = ("adamw_torch", "adamw_torch_fused", "adamw_hf")

_LEFT = (
    (r"lora_.*|use_dora|use_rslora", "adapters here: docs/lora.md"),
    (r"vllm_.*|use_transformers_paged|cache_implementation", "how TRL runs its engine; ours is described in rollout"),
    (r"(eval|do_eval|per_device_eval|num_generations_eval).*|dataset_test_split", "TRL's evaluation: train.eval_every"),
    (r"save_.*|output_dir|overwrite_.*|resume_.*|load_best.*|metric_for.*|greater_is.*",
     "checkpoints here have a form of their own (docs/long_runs.md), counted in batches of samples"),
    (r"log.*|num_completions_to_print|run_name|push_to_hub|hub_.*|report_.*|disable_tqdm|trackio_.*|project",
     "tracking and publishing of TRL; trackers here: observe.sinks"),
    (r"deepspeed|fsdp.*|ddp_.*|ds3_.*|accelerator_config|tf32|torch_compile.*|dataloader_.*|auto_find.*|gradient_checkp.*"
     r"|dtype|torch_dtype|attn_implementation|ignore_data_skip|average_tokens.*|group_by_length|no_cuda|use_cpu",
     "how TRL places and computes; ours is described in `learner`"),
    (r"dataset_.*|datasets|remove_unused_columns|shuffle_dataset|max_prompt_length|data_seed|label_names",
     "how TRL loads its data"),
    (r"ref_model_.*|.*sapo_.*", "no effect beside the other settings"),
    (r"trust_remote_code|model_revision|load_in_.*|use_bnb.*|bnb_.*", "how TRL loads the model"),
    (r"max_tool_calling_iterations|environment.*|tools", "turns are a function here: rollout.function"),
)  # fmt: skip


def reason_of(key: str, setting: ForeignSetting) -> tuple[str, bool]:
    """The reason that this setting is not translated, and whether somebody has to decide about it."""
    if key in _CHANGES:
        harmless, reason = _CHANGES[key]
        same = setting.value == harmless or setting.value is None or (key == "optim" and setting.value in _ADAM)
        return (setting.unread or reason, True) if setting.unread or not same else ("off, or TRL's default", False)
    if key.startswith("$"):
        return setting.unread, True
    for pattern, reason in _LEFT:
        if re.fullmatch(pattern, key):
            return reason, False
    return (setting.unread, True) if setting.unread else ("unknown to this translator", False)
