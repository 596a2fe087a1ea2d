"""Check that a checkpoint holds the tensors of the model in its config.json, before any of them is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from moe_trm.errors import CheckpointError
from moe_trm.learner.hf_checkpoint import HfCheckpoint
from moe_trm.models.registry import find_family
from moe_trm.models.tensors import EMBEDDING, OUTPUT, tensor_names


def check_tensors(checkpoint: HfCheckpoint, hf: Mapping[str, Any]) -> None:
    """Refuse a checkpoint that neither learner could train as it is.

    Only names are looked at, and a copy of tied weights. Layers that predict several tokens at once are no part of the
    model: neither transformers nor Megatron has them here.

    DeepSpeed may also train a family that `moe_trm.models` does not know. There transformers says what is lacking.

    Raises:
        CheckpointError: a quantised checkpoint without scales; tensors that are missing, or that the model has no place
            for; a copy of tied weights that is none.
    """
    _check_scales(checkpoint)
    family, where = find_family(hf), str(checkpoint.folder)
    if family is None:
        return
    expected_names = tensor_names(family, hf)
    missing = sorted(expected_names - checkpoint.names)
    # A tied checkpoint may still carry its output weight, which is then the embedding a second time.
    unexpected = sorted(checkpoint.names - expected_names - {OUTPUT})
    if missing == [OUTPUT]:
        raise CheckpointError(
            "checkpoint has no output weight",
            where=where,
            got=f"no {OUTPUT}, and config.json does not tie it to the embedding",
            expected=f"{OUTPUT}, or tie_word_embeddings=true in config.json",
            fix=(
                "If the model was trained with tied embeddings set tie_word_embeddings=true in its config.json; else "
                "copy it again, completely."
            ),
        )
    if missing or unexpected:
        raise CheckpointError(
            "checkpoint does not hold the tensors of the model in config.json",
            where=where,
            got=(
                f"{len(missing)} missing: {missing[:3]}; {len(unexpected)} without a place in the model: "
                f"{unexpected[:3]}"
            ),
            expected=f"the {len(expected_names)} tensors of this model under the names of transformers",
            fix=(
                "Missing ones alone: copy or download it again, completely. Both: tensors were renamed, or "
                "config.json is another model's."
            ),
        )
    if (
        hf.get("tie_word_embeddings")
        and OUTPUT in checkpoint.names
        and not torch.equal(checkpoint.read(OUTPUT), checkpoint.read(EMBEDDING))
    ):
        raise CheckpointError(
            "output weight and embedding differ, but config.json ties them",
            where=where,
            got=f"another {OUTPUT}",
            expected="the embedding once more, or no output weight",
            fix="Set tie_word_embeddings=false in config.json if the model was trained with both.",
        )


def _check_scales(checkpoint: HfCheckpoint) -> None:
    form = checkpoint.quantisation
    if form is not None and all(len(checkpoint.parts(name)) == 1 for name in checkpoint.names):
        raise CheckpointError(
            "config.json announces quantised weights, and no tensor has scales",
            where=f"{checkpoint.folder}/config.json, quantization_config",
            got=f"{form.method} with {len(checkpoint.names)} tensors without scales",
            expected="weights with scales, or a config.json without quantization_config",
            fix="Use the config.json that belongs to these weights; that of plain ones has no quantization_config.",
        )
