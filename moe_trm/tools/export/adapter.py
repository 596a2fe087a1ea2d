"""Adapters of a run's checkpoint: merged into the weights of a Hugging Face folder, or as peft's files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_trm.config.schema import LearnerConfig, LoraConfig
from moe_trm.errors import CheckpointError
from moe_trm.learner.checkpoint.folder import STATE_FILE, Manifest, read_manifest, verify
from moe_trm.learner.checkpoint.pieces import PieceReader
from moe_trm.learner.hf_checkpoint import HfCheckpoint
from moe_trm.learner.lora.adapter import A, B, factor_name, merged
from moe_trm.learner.lora.files import write_adapter
from moe_trm.learner.lora.targets import adapted_modules, matrix_modules, modules_of
from moe_trm.models.hf_config import read_hf_config
from moe_trm.sync.rounding import DTYPES

CONVERTED = frozenset(("MixtralForCausalLM", "Qwen3MoeForCausalLM"))
"""Architectures with adapted experts that peft loads: transformers 5 stacks experts, and peft converts these alone."""


def lora_of(manifest: Manifest) -> LoraConfig:
    """The adapters of the run that wrote this checkpoint."""
    saved = manifest.config.get("learner", {}).get("lora") or {}
    return LoraConfig(**{key: saved[key] for key in ("rank", "alpha", "targets") if saved.get(key) is not None})


def saved_factors(
    reader: PieceReader, hf: Mapping[str, Any], source: HfCheckpoint, learner: LearnerConfig
) -> dict[str, Tensor]:
    """The float32 masters of every factor, by `factor_name`, from a checkpoint of either learner in any layout.

    `source` is the checkpoint that the run started from. Raises `CheckpointError` for a factor that is missing.
    """
    modules = adapted_modules(modules_of(hf, source.names), learner.lora, hf)
    if learner.backend == "deepspeed":
        from moe_trm.learner.deepspeed.saved import SavedModel

        return dict(SavedModel(source.folder).saved_factors(reader, modules))
    names = (factor_name(module, factor) for module in sorted(modules) for factor in (A, B))
    return {name: reader.read(f"weight/{name}") for name in names}


def merged_tensors(
    factors: Mapping[str, Tensor], source: HfCheckpoint, learner: LearnerConfig
) -> Iterator[tuple[str, Tensor]]:
    """Every adapted matrix as the learner's passes had it, under its Hugging Face name, in the learner's dtype."""
    dtype = DTYPES[learner.dtype]
    for module in dict.fromkeys(name.rsplit(".", 2)[0] for name in factors):
        a_RI, b_OR = (factors[factor_name(module, factor)].to(dtype) for factor in (A, B))
        precise = torch.promote_types(dtype, torch.float32)
        base = source.read(f"{module}.weight").to(dtype)
        yield f"{module}.weight", merged(base, b_OR.to(precise) @ a_RI.to(precise), learner.lora.scale)


def peft_warning(checkpoint: Path, model: Path | None = None) -> str:
    """The reason why peft cannot load the adapter of a step as transformers 5 builds its model; else nothing."""
    manifest = read_manifest(checkpoint)
    (architecture,) = read_hf_config(model or Path(manifest.config["model"]["checkpoint"]))["architectures"]
    if "experts" not in lora_of(manifest).targets or architecture in CONVERTED:
        return ""
    return (
        f"peft with transformers 5 does not load adapters of {architecture}'s experts, which are stacked there: "
        "leave out --adapter for the merged weights, or load it with transformers 4"
    )


def export_adapter(checkpoint: Path, out: Path, *, model: Path | None = None) -> Path:
    """Write the adapter of a `step-NNNNNN` folder as a new folder that peft loads, in the learner's dtype, and return
    it.

    `model`: where the start checkpoint lies now; None: where the run found it. Raises `CheckpointError` where `out`
    exists, the run trained no adapter, the checkpoint is damaged, or the start checkpoint is not there.
    """
    if out.exists():
        raise CheckpointError(
            "there is something at this place already", where=str(out), fix="Remove it, or set --out to another place."
        )
    manifest = read_manifest(checkpoint)
    lora = lora_of(manifest)
    if not lora.rank:
        raise CheckpointError(
            "this run trained no adapter",
            where=str(checkpoint),
            got="learner.lora.rank=0",
            expected="a run with adapters",
            fix="Leave out --adapter: the weights themselves were trained.",
        )
    verify(checkpoint, manifest, sorted(manifest.files))
    start = model or Path(manifest.config["model"]["checkpoint"])
    hf, source = read_hf_config(start), HfCheckpoint(start)
    saved = manifest.config["learner"]
    learner = LearnerConfig(lora=lora, **{key: saved[key] for key in ("backend", "dtype") if saved.get(key)})
    reader = PieceReader(checkpoint / name for name in sorted(manifest.files) if name != STATE_FILE)
    factors = saved_factors(reader, hf, source, learner)
    cast = {name: tensor.to(DTYPES[learner.dtype]) for name, tensor in factors.items()}
    out.mkdir(parents=True)
    write_adapter(out, cast, lora, matrix_modules(modules_of(hf, source.names), hf), str(start))
    return out
