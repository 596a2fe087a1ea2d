"""Tiny checkpoints in FP8 and MXFP4, with the plain weights that they mean beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.published import stored_form
from moe_trm.models.quantisation import BLOCKS, SCALE_INV, SCALES, quantisation_of
from tests.integration.learner_support.families import make_family

BLOCK = 16
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "fp8": (
        "deepseek_v3",
        {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic", "fmt": "e4m3"},
    ),
    "mxfp4": ("gpt_oss", {"quant_method": "mxfp4"}),
}
"""By form: a family that is published in it, and what config.json says of it."""


def make_quantised(form: str, folder: Path) -> Path:
    """A checkpoint in `form`, in `folder`, which is returned; its plain weights are in `plain(folder)`."""
    family, described = FORMS[form]
    made = make_family(family, plain(folder))
    hf = json.loads((made / "config.json").read_text())
    hf |= {"quantization_config": described, "dtype": "bfloat16"}
    quantisation = quantisation_of(hf, str(folder))
    stored = {
        part: one
        for name, tensor in load_file(made / "model.safetensors").items()
        for part, one in stored_form(name, low(name, tensor), quantisation).items()
    }
    folder.mkdir()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(hf))
    save_file(by_hand(stored), made / "model.safetensors", metadata={"format": "pt"})
    return folder


def plain(folder: Path) -> Path:
    """Where the weights lie that the quantised ones in `folder` mean."""
    return folder.with_name(f"{folder.name}-plain")


def low(name: str, tensor: Tensor) -> Tensor:
    """As it is published: in bfloat16, but for the biases that choose experts."""
    return tensor if name.endswith("e_score_correction_bias") else tensor.bfloat16()


def by_hand(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """The published dequantisations, in float32: of FP8 number by number, of MXFP4 by transformers' own function."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    found: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        if name.endswith((SCALE_INV, SCALES)):
            continue
        if name.endswith(BLOCKS):
            whole = name.removesuffix(BLOCKS)
            found[whole] = convert_moe_packed_tensors(tensor, stored[whole + SCALES]).float()
        elif name + SCALE_INV in stored:
            scale = stored[name + SCALE_INV]
            rows, columns = (torch.arange(size) // BLOCK for size in tensor.shape)
            found[name] = (tensor.float() * scale[rows][:, columns]).bfloat16().float()
        else:
            found[name] = tensor.float()
    return {name: tensor.contiguous() for name, tensor in found.items()}
