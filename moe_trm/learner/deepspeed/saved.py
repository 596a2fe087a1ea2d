"""Weights that DeepSpeed learners saved (`state`), in Hugging Face form. Needs no ranks and no DeepSpeed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_trm.errors import CheckpointError
from moe_trm.learner.checkpoint.pieces import PieceReader
from moe_trm.learner.deepspeed.hf_model import config_with_vision, model_config
from moe_trm.learner.deepspeed.lora import canonical, places
from moe_trm.learner.deepspeed.weights import checkpoint_form

WEIGHT = "weight/"


class SavedModel:
    """The names of a model of transformers, without its weights.

    Args:
        folder: the checkpoint that training started from; only its config.json is read.
        vision: the whole model of a release that reads images was trained.
    """

    def __init__(self, folder: Path, *, vision: bool = False) -> None:
        from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

        kind: Any = AutoModelForImageTextToText if vision else AutoModelForCausalLM
        with torch.device("meta"):
            self._causal: Any = kind.from_config(config_with_vision(folder) if vision else model_config(folder))

    @property
    def constants(self) -> frozenset[str]:
        """Hugging Face names of what no learner trains: the buffers."""
        trained = {name for name, _ in self._causal.named_parameters(remove_duplicate=False)}
        buffers = {name: tensor for name, tensor in self._causal.state_dict().items() if name not in trained}
        return frozenset(
            hf_name for name, tensor in buffers.items() for hf_name in checkpoint_form(self._causal, name, tensor)
        )

    def saved_factors(self, reader: PieceReader, modules: frozenset[str]) -> Iterator[tuple[str, Tensor]]:
        """The factors of adapters of `modules`, in the dtype of the master weights; names are those of peft.

        Raises:
            CheckpointError: a factor that is missing, or of which a part is.
        """
        for place in places(self._causal, modules):
            for owner, _ in place.factors():
                for factor in (f"{owner}.A", f"{owner}.B"):
                    yield from canonical(place, factor, reader.read(WEIGHT + factor))

    def saved_tensors(self, reader: PieceReader) -> Iterator[tuple[str, Tensor]]:
        """Every trained tensor under its Hugging Face name, in the dtype of the master weights.

        Raises:
            CheckpointError: a parameter that this model does not have, one of another shape, or a missing part.
        """
        parameters = dict(self._causal.named_parameters())
        for saved in reader.names(WEIGHT):
            name = saved.removeprefix(WEIGHT)
            if name not in parameters:
                raise CheckpointError(
                    "the checkpoint holds a parameter that the model does not have",
                    where=name,
                    got=name,
                    expected="a parameter of the model that config.json describes",
                    fix="Give the checkpoint that this run started from with --model.",
                )
            yield from checkpoint_form(self._causal, name, reader.read(saved, parameters[name].shape)).items()
