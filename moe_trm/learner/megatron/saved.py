"""Weights that Megatron-Core learners saved (`state`), in Hugging Face form. Needs no ranks and no Megatron-Core."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from moe_trm.learner.checkpoint.pieces import PieceReader
from moe_trm.learner.megatron import convert
from moe_trm.models.hf_config import num_experts
from moe_trm.models.tensors import OUTPUT

WEIGHT = "weight/"


def saved_tensors(reader: PieceReader, hf: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Every trained tensor under its Hugging Face name, in the dtype of the master weights, from a checkpoint of any
    layout.

    Raises `CheckpointError` for a parameter that this model does not have, or one of which a part is missing.
    """
    names, shape, tied = convert.Names(hf), convert.heads(hf), bool(hf.get("tie_word_embeddings", False))
    rows: dict[str, dict[int, Tensor]] = defaultdict(dict)
    for saved in reader.names(WEIGHT):
        name = saved.removeprefix(WEIGHT)
        link = names.link(name)
        if tied and link.hf_names == (OUTPUT,):
            continue
        full_tensor = reader.read(saved)
        # Gate and up rows are saved as `[2, rows, columns]`.
        packed = full_tensor.flatten(0, 1) if convert.is_gated(name) else full_tensor
        for hf_name, tensor in zip(link.hf_names, convert.unpack(link.packing, packed, shape), strict=True):
            if link.row is None:
                yield hf_name, tensor
                continue
            rows[hf_name][link.row] = tensor
            if len(rows[hf_name]) == num_experts(hf):
                of_layer = rows.pop(hf_name)
                yield hf_name, torch.stack([of_layer[row] for row in sorted(of_layer)])
