"""Check that a checkpoint holds the tensors of the model in its config.json, before any of them is loaded."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from moe_trm.errors import CheckpointError
from moe_trm.learner.hf_checkpoint import HfCheckpoint
from moe_trm.models.registry import find_family
from moe_trm.models.tensors import EMBEDDING, OUTPUT, tensor_names


def check_tensors(checkpoint: HfCheckpoint, hf: Mapping[str, Any]) -> None:
    """Refuse a checkpoint that neither learner could train as it is.

    Only names are looked at, and a copy of tied weights.

    Of a family that `moe_trm.models` does not know, which DeepSpeed may still train, transformers says what is lacking.

    Raises:
        CheckpointError: quantised weights; tensors that are missing, or that the model has no place for; a copy of tied
            weights that is none.
    """
    _check_precision(checkpoint, hf)
    family, where = find_family(hf), str(checkpoint.folder)
    if family is None:
        return
    known = tensor_names(family, hf)
    missing = sorted(known - checkpoint.names)
    # A tied checkpoint may still carry its output weight, which is then the embedding a second time. Layers behind the
    # last are for predicting several tokens at once; neither transformers nor Megatron's model here has them.
    unexpected = sorted(
        name
        for name in checkpoint.names - known - {OUTPUT}
        if not _is_prediction_layer(name, int(hf["num_hidden_layers"]))
    )
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
            expected=f"the {len(known)} tensors of this model under the names of transformers",
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


def _check_precision(checkpoint: HfCheckpoint, hf: Mapping[str, Any]) -> None:
    quantisation = hf.get("quantization_config")
    if quantisation:
        raise CheckpointError(
            "checkpoint is quantised",
            where=f"{checkpoint.folder}/config.json, quantization_config",
            got=quantisation.get("quant_method", quantisation),
            expected="weights in bfloat16, float16 or float32",
            fix=(
                "Load it with transformers, dequantised (its quantisation classes have `dequantize=True`), save it, "
                "and train that."
            ),
        )


def _is_prediction_layer(hf_name: str, num_layers: int) -> bool:
    layer = re.match(r"model\.layers\.(\d+)\.", hf_name)
    return layer is not None and int(layer[1]) >= num_layers
