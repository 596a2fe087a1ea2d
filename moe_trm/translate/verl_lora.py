"""verl's adapters in ours. Its megatron-bridge form (`actor_rollout_ref.model.lora`) names modules as Megatron does."""

from __future__ import annotations

from moe_trm.translate.draft import Draft
from moe_trm.translate.foreign_setting import NeedsDecisionError
from moe_trm.translate.values import Rule, integer, number

MODEL = "actor_rollout_ref.model"


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


LORA = (
    Rule((f"{MODEL}.lora_rank", f"{MODEL}.lora_alpha"), ("learner.lora.rank", "learner.lora.alpha"), _lora),
    Rule(
        (f"{MODEL}.lora_rank", f"{MODEL}.target_modules", f"{MODEL}.exclude_modules"),
        ("learner.lora.targets",),
        _targets,
    ),
)
