"""Adapters in peft's files: `adapter_config.json` and `adapter_model.safetensors`.

A factor is `base_model.model.` + module + `.lora_A.weight` `[R, I]` or `.lora_B.weight` `[O, R]`, with one entry for
each expert. Source: peft, docs/source/developer_guides/checkpoint.md and src/peft/tuners/lora/config.py.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from moe_trm.config.schema import LoraConfig
from moe_trm.errors import CheckpointError
from moe_trm.learner.hf_checkpoint import HfCheckpoint
from moe_trm.learner.lora.adapter import A, B, factor_name

CONFIG, WEIGHTS, PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."
_PLAIN: Mapping[str, tuple[object, ...]] = {
    "use_dora": (False, None),
    "use_rslora": (False, None),
    "fan_in_fan_out": (False, None),
    "bias": ("none", None),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layer_replication": (None, []),
}
"""Options of peft that change what an adapter means, with the values that mean plain LoRA."""


def write_adapter(
    folder: Path, factors: Mapping[str, Tensor], lora: LoraConfig, matrices: Collection[str], base: str
) -> None:
    """Write an adapter that peft loads into an existing folder.

    `matrices` are the modules that could have an adapter. `base` is the checkpoint that the adapter belongs to.
    """
    alpha = lora.alpha
    modules = {name.rsplit(".", 2)[0] for name in factors}
    config: dict[str, object] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "revision": None,
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": 0.0,
        "target_modules": target_modules(modules, matrices),
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "use_dora": False,
        "use_rslora": False,
    }
    named = {PREFIX + name: tensor.contiguous() for name, tensor in factors.items()}
    save_file(named, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")


def target_modules(modules: Collection[str], matrices: Collection[str]) -> list[str]:
    """peft's `target_modules`: the last parts of names where they mean these modules alone, else whole names."""
    unadapted = {name.rpartition(".")[2] for name in set(matrices) - set(modules)}
    return sorted({leaf if (leaf := name.rpartition(".")[2]) not in unadapted else name for name in modules})


def read_adapter(
    folder: str | Path, lora: LoraConfig, modules: Collection[str], checkpoint: HfCheckpoint
) -> dict[str, Tensor]:
    """The factors in an adapter's folder, as peft writes it, by `factor_name`, on the CPU.

    Raises `CheckpointError` for missing files, and for another kind, rank, scale or set of matrices than `modules`, or
    other shapes than those of `checkpoint`.
    """
    _check_config(Path(folder), lora)
    path = Path(folder) / WEIGHTS
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            tensors = {str(name).removeprefix(PREFIX): file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            "adapter has no weights that can be read",
            where=str(path),
            got=str(error),
            expected="peft's safetensors",
            fix="Save it with peft's save_pretrained, or copy it again.",
        ) from error
    expected_names = {factor_name(module, factor) for module in modules for factor in (A, B)}
    if tensors.keys() != expected_names:
        raise CheckpointError(
            "adapter changes other matrices than this run",
            where=str(path),
            got=f"missing {sorted(expected_names - tensors.keys())[:3]}, "
            f"more {sorted(tensors.keys() - expected_names)[:3]}",
            expected="both factors of each matrix of learner.lora.targets",
            fix="Set learner.lora.targets to those of the adapter.",
        )
    for module in modules:
        outputs, inputs = checkpoint.shape(f"{module}.weight")
        for factor, shape in ((A, (lora.rank, inputs)), (B, (outputs, lora.rank))):
            tensor = tensors[factor_name(module, factor)]
            if tuple(tensor.shape) != shape or not bool(torch.isfinite(tensor).all()):
                raise CheckpointError(
                    "adapter does not fit the model",
                    where=f"{path}, {factor_name(module, factor)}",
                    got=f"{list(tensor.shape)}, finite: {bool(torch.isfinite(tensor).all())}",
                    expected=f"{list(shape)}, finite",
                    fix="Use the adapter of this checkpoint, or set learner.lora.adapter=null.",
                )
    return tensors


def _check_config(folder: Path, lora: LoraConfig) -> None:
    path = folder / CONFIG
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            "adapter has no configuration that can be read",
            where=str(path),
            got=str(error),
            expected="peft's adapter_config.json",
            fix="Set learner.lora.adapter to the folder that peft's save_pretrained wrote.",
        ) from error
    needed: dict[str, tuple[object, ...]] = {
        "peft_type": ("LORA",),
        "r": (lora.rank,),
        "lora_alpha": (lora.alpha,),
        **_PLAIN,
    }
    for key, accepted in needed.items():
        # peft's own defaults are the plain values, but for rank and alpha.
        value = config.get(key, {"r": 8, "lora_alpha": 8}.get(key, accepted[0]))
        if value not in accepted:
            raise CheckpointError(
                "adapter is of another kind than this run trains",
                where=f"{path}, {key}",
                got=value,
                expected=accepted[0],
                fix="Set learner.lora.rank and alpha to the adapter's, or merge it into the checkpoint with peft.",
            )
