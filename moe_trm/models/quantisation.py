"""The forms in which published checkpoints hold their weights, from config.json and the names of tensors.

- `fp8`: `NAME.weight` in float8_e4m3fn, and `NAME.weight_scale_inv` with one scale for each block of
  `weight_block_size` weights (DeepSeek-V3, Kimi-K2, Qwen3-FP8, MiniMax-M2).
- `mxfp4`: `NAME_blocks`, two 4-bit floats to a byte, and `NAME_scales`, one exponent for each 32 of them (gpt-oss).
- `int4`: `NAME.weight_packed`, eight 4-bit integers to a word, `NAME.weight_scale`, one scale for each group of them in
  a row, and `NAME.weight_shape` (compressed-tensors: the experts of Kimi-K2.5).

A tensor without scales is held as it is, as those of `modules_to_not_convert` are. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from moe_trm.errors import CheckpointError

SCALE_INV = "_scale_inv"
"""The end of the name of an FP8 weight's scales, behind that of the weight."""
BLOCKS, SCALES = "_blocks", "_scales"
"""The ends of the names of the two parts of an MXFP4 weight, behind that of the weight."""
PACKED, SCALE, SHAPE = "_packed", "_scale", "_shape"
"""The ends of the names of the parts of an INT4 weight, behind that of the weight."""
_E4M3 = ("e4m3", "float8_e4m3fn")
"""Names of one number format: DeepSeek's, and MiniMax's."""
_DESCRIPTION = ("quant_method", "quant_algo", "format", "weight_block_size", "activation_scheme", "fmt")
_INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
"""Integers with a scale for each group in a row, and no zero point."""


@dataclass(frozen=True)
class Quantisation:
    """The form in which a checkpoint holds its weights.

    Attributes:
        method: see the module.
        block: rows and columns that share a scale in `fp8` and `int4`.
        powers: scales of `fp8` are powers of two (`scale_fmt=ue8m0`).
        dtype: in which the published dequantisation gives the weights: that of config.json.
    """

    method: Literal["fp8", "mxfp4", "int4"]
    block: tuple[int, int] = (128, 128)
    powers: bool = False
    dtype: str = "bfloat16"


def quantisation_of(hf: Mapping[str, Any], where: str) -> Quantisation | None:
    """The form of the weights that config.json announces; None: plain tensors.

    Raises `CheckpointError` for a form that is not read here, or an incomplete description; `where` is the file.
    """
    described = hf.get("quantization_config")
    if not described:
        return None
    method, dtype = described.get("quant_method"), str(hf.get("dtype") or hf.get("torch_dtype") or "bfloat16")
    if method == "mxfp4":
        return Quantisation("mxfp4", dtype=dtype)
    if group := _int4_group(described):
        return Quantisation("int4", (1, group), dtype=dtype)
    block = tuple(map(int, described.get("weight_block_size") or ()))
    usual = described.get("activation_scheme", "dynamic") == "dynamic" and described.get("fmt", "e4m3") in _E4M3
    if method == "fp8" and len(block) == 2 and usual:
        return Quantisation("fp8", (block[0], block[1]), described.get("scale_fmt") == "ue8m0", dtype)
    raise CheckpointError(
        "checkpoint is quantised in a form that is not read here",
        where=f"{where}, quantization_config",
        got=", ".join(f"{key}={described[key]}" for key in _DESCRIPTION if key in described) or described,
        expected=(
            "plain weights, fp8 (e4m3) in blocks with dynamic activations, mxfp4, or compressed-tensors with packed "
            "int4 weights in groups"
        ),
        fix=(
            "Take the release of this model in bfloat16, or load this one with transformers, dequantised (its "
            "quantisation classes have `dequantize=True`), save it, and train that."
        ),
    )


def _int4_group(described: Mapping[str, Any]) -> int:
    """Numbers that share a scale where all quantised weights are packed int4 alike; else 0."""
    schemes = list((described.get("config_groups") or {}).values())
    packed = described.get("quant_method") == "compressed-tensors" and described.get("format") == "pack-quantized"
    if not packed or len(schemes) != 1 or described.get("kv_cache_scheme"):
        return 0
    weights = schemes[0].get("weights") or {}
    usual = all(weights.get(key) == value for key, value in _INT4.items()) and not weights.get("actorder")
    others = schemes[0].get("input_activations") or schemes[0].get("output_activations")
    return int(weights.get("group_size") or 0) if usual and not others else 0


def parts_of(names: Collection[str], quantisation: Quantisation | None) -> dict[str, tuple[str, ...]]:
    """The tensors of the model by name, and those of the files that each is made of: itself, or values and scales."""
    if quantisation is None:
        return {name: (name,) for name in names}
    if quantisation.method == "fp8":
        scaled = {name for name in names if name + SCALE_INV in names}
        hidden = {name + SCALE_INV for name in scaled}
        return {name: (name, name + SCALE_INV) if name in scaled else (name,) for name in names if name not in hidden}
    ends = (BLOCKS, SCALES) if quantisation.method == "mxfp4" else (PACKED, SCALE, SHAPE)
    stems = {name.removesuffix(ends[0]) for name in names if name.endswith(ends[0])}
    stems = {stem for stem in stems if all(stem + end in names for end in ends)}
    hidden = {stem + end for stem in stems for end in ends}
    plain = {name: (name,) for name in names if name not in hidden}
    return plain | {stem: tuple(stem + end for end in ends) for stem in stems}
