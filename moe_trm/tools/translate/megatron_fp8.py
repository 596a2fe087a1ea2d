"""Megatron's 8-bit training, which several frameworks hand through, in ours."""

from __future__ import annotations

from moe_trm.tools.translate.draft import Draft
from moe_trm.tools.translate.foreign_setting import NeedsDecisionError
from moe_trm.tools.translate.values import Reader, Rule

FORMATS = {"delayed": "hybrid", "tensorwise": "hybrid", "blockwise": "e4m3", "mxfp8": "e4m3"}
"""The format of each recipe here, by Megatron-Core's names."""

BFLOAT16_LAYERS = ("first_last_layers_bf16", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
"""Megatron-Core's names for the layers that it leaves in bfloat16."""


def fp8(form_key: str, recipe_key: str, bfloat16_layer_keys: tuple[str, ...], read: Reader) -> Rule:
    """The recipe is ours; a format that it has not here needs a decision. Megatron rounds every layer, ours not the
    outermost ones unless `learner.fp8_bfloat16_layers` is 0.
    """

    def apply(draft: Draft) -> None:
        form, recipe = read(draft, form_key), read(draft, recipe_key) or "delayed"
        if form in (None, "none", "null", False):
            draft.miss(recipe_key, "FP8 is off")
            return
        if FORMATS.get(recipe) != form:
            pairs = ", ".join(f"{own_form} for {name}" for name, own_form in FORMATS.items())
            raise NeedsDecisionError(form_key, f"{form} with the recipe {recipe}: learner.fp8 has {pairs}")
        draft.put("learner.fp8", recipe, form_key, *([recipe_key] if recipe_key in draft.settings else []))
        if any(key in draft.settings for key in bfloat16_layer_keys):
            for key in bfloat16_layer_keys:
                if key in draft.settings:
                    draft.decide(
                        key, "layers that stay in bfloat16: learner.fp8_bfloat16_layers", "learner.fp8_bfloat16_layers"
                    )
        else:
            draft.put("learner.fp8_bfloat16_layers", 0, form_key)

    return Rule((form_key, recipe_key, *bfloat16_layer_keys), ("learner.fp8", "learner.fp8_bfloat16_layers"), apply)
