"""Reasons for flags of slime and miles that have no counterpart here."""

from __future__ import annotations

import re
from collections.abc import Sequence

from moe_trm.translate.foreign_setting import ForeignSetting

_CHANGES: Sequence[tuple[str, str]] = (
    (r"use-(rollout-)?indexer-replay", "the indexer's choices are not replayed here"),
    (
        r".*(lora|adapter|target-modules|exclude-modules).*",
        "adapters here have no dropout: choose learner.lora.targets by Hugging Face names (docs/lora.md)",
    ),
    (
        r"use-opd|opd-.*",
        "to distil on policy here set kl.teacher, kl.where=advantage, kl.estimator=k1 and kl.coef (docs/training.md)",
    ),
    (r"enable-mtp-training|use-rollout-entropy", "not available here"),
    (r"mask-offpolicy-in-partial-rollout", "corrections do that here: a rule on the total ratio"),
    (
        r"loss-type|custom-.*-path|buffer-filter-path|rollout-.*-path|data-source-path|eval-function-path",
        "a function of its own: see docs/tasks.md and examples/own_methods",
    ),
    (r"custom-config-path|eval-config|megatron-config-path", "its settings are in another file"),
    (
        r"max-weight-staleness|fully-async|async-.*|update-weights-interval",
        "asynchronous training: choose pipeline.mode, max_staleness and push_every (docs/pipeline.md)",
    ),
    (
        r"group-rm|reward-key|eval-reward-key|rm-url|rollout-stop.*|rollout-max-context-len|"
        r"eval-input-key|eval-label-key",
        "the task here has no such setting: see docs/tasks.md",
    ),
    (r"freeze-params-name-list|only-train-params-name-list", "only routers can be frozen: learner.freeze_router"),
    (
        r"ref-update-interval|reset-optimizer-states|normalize-advantages|keep-old-actor|no-load-optim|finetune",
        "not available here",
    ),
    (r"use-dynamic-global-batch-size|disable-compute-advantages-and-returns", "not available here"),
    (
        r"use-precision-aware-optimizer|main-.*-dtype|exp-avg.*",
        "state of the optimizer is always float32 here, and on the host with learner.offload_optimizer",
    ),
)
"""Flags that would change the training: they need a decision."""

_SHAPE = (
    r"(num|hidden|ffn|kv|max-position|rotary|rope|norm|swiglu|group-query|untie|vocab|make-vocab|disable-bias|add-qkv"
    r"|qk|position|use-rotary|normalization|q-lora|v-head|multi-latent|linear|mtp|experimental|dsa|spec|apply-layernorm"
    r"|attention-output|gated|no-rope|mrope|squared|bos|window|kimi|softmax).*"
)

_LEFT: Sequence[tuple[str, str]] = (
    (
        r"(actor|critic)-num.*|rollout-num-gpus|num-gpus.*|prefill-num.*|rollout-external.*|start-rollout-id",
        "not a setting here: `moe-trm train --nproc-per-node`, several nodes: launch/slurm.sh",
    ),
    (
        r"(sglang|router|slime-router|miles-router|use-slime-router|use-miles-router)-?.*",
        "arguments of the engine go to rollout.server.extra_args here",
    ),
    (r"moe-.*", "the model's experts are read from its config.json, and kernels are chosen by the learner"),
    (
        r"load|ref-load|ref-ckpt-step|ckpt-.*|critic-load|megatron-to-hf-mode|.*-save.*|save-.*|dist-ckpt.*|async-save",
        "training starts from model.checkpoint, and checkpoints here have a form of their own",
    ),
    (r"eval-.*|skip-eval-before-train|n-samples-per-eval.*|log-.*", "how slime evaluates and logs"),
    (
        r"(wandb|tb|tensorboard|mlflow|prometheus|profile|memory|record-memory|use-pytorch-profiler|debug|ci|dump).*",
        "tracking and debugging of slime; trackers here: observe.sinks",
    ),
    (
        r"balance-.*|rollout-shuffle|sequence-parallel|accumulate-allreduce-grads-in-fp32|"
        r"attention-softmax-in-fp32|bf16",
        "always so here",
    ),
    (r"rollout-seed", "one seed serves all here: seed"),
    (
        r"rollout-max-prompt-len|rollout-skip-special-tokens|rollout-health.*|use-fault-tolerance|metadata-key|tool-key"
        r"|multimodal-keys|loss-mask-type|n-samples.*|rollout-task-type|.*buffer.*|rollout-.*",
        "how slime samples and loads its data",
    ),
    (
        r"attention-.*|transformer-impl|recompute-.*|no-.*-fusion|overlap-.*|use-distributed.*|log-probs-.*|train-.*"
        r"|distributed-.*|offload.*|colocate|update-weight.*|data-pad.*|use-flash.*|micro-.*|tp-comm.*"
        r"|decoder-.*|account-.*|virtual-.*|num-layers-per.*|.*parallel.*|.*backend.*|.*dropout.*|calculate-.*|grad-.*"
        r"|deterministic.*|override-opt.*|use-.*-optimizer|fp8-.*|fp16|true-on-policy.*|context-.*|cp-.*|allgather.*",
        "how slime's engine places and computes; ours is described in `learner`",
    ),
    (r"get-mismatch-metrics", "the mismatch is always measured here"),
    (_SHAPE, "the model's shape is read from its config.json"),
)


def reason_of(key: str, setting: ForeignSetting) -> tuple[str, bool]:
    """The reason that this flag is not translated, and whether somebody has to decide about it."""
    for pattern, reason in _CHANGES:
        if re.fullmatch(pattern, key):
            return f"{setting.unread}; {reason}" if setting.unread else reason, True
    if key.startswith("$"):
        return setting.unread, key not in ("$@", "$*", "${@}", "${*}")
    for pattern, reason in _LEFT:
        if re.fullmatch(pattern, key):
            return reason, False
    return "unknown to this translator", False
