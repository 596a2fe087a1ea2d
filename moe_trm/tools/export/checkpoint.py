"""A Hugging Face folder from a checkpoint of any learner in any layout, made by one process without ranks."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor

from moe_trm.config.schema import LearnerConfig
from moe_trm.errors import CheckpointError
from moe_trm.learner.checkpoint.folder import STATE_FILE, Manifest, read_manifest, verify
from moe_trm.learner.checkpoint.pieces import PieceReader
from moe_trm.learner.hf_checkpoint import HfCheckpoint
from moe_trm.learner.hf_export import SHARD_BYTES, write_companions, write_files, write_index
from moe_trm.learner.hf_form import ChangeLoss, ExportForm
from moe_trm.learner.parameter_groups import is_frozen
from moe_trm.models.hf_config import read_hf_config
from moe_trm.models.registry import find_family
from moe_trm.models.tensors import OUTPUT, tensor_names
from moe_trm.tools.export.adapter import lora_of, merged_tensors, saved_factors

_CONSTANT = ".e_score_correction_bias"


def export_checkpoint(
    checkpoint: Path,
    out: Path,
    *,
    model: Path | None = None,
    published: bool = False,
    loss: ChangeLoss | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write the weights of a `step-NNNNNN` folder as a new Hugging Face folder, which appears when complete, and return
    it.

    They are those that the learner itself would have exported at that step, bit for bit. Adapters are merged: equal up
    to the rounding of a float32 product. What was not trained is as in the checkpoint that the run started from: a
    frozen router, biases that choose experts, layers that predict several tokens at once. Config and tokenizer are that
    one's, too.

    Args:
        model: where the start checkpoint lies now; None: where the run found it.
        published: write tensors in the form of the start checkpoint; else in the learner's dtype (`ExportForm`).
        loss: counts what a published form loses of the training.
        shard_bytes: of one file at most, apart from a larger tensor; they are held until it is written.

    Raises `CheckpointError` where `out` exists, the checkpoint is damaged or of another format, or the start checkpoint
    is not there, or another model's.
    """
    if out.exists():
        raise CheckpointError(
            "there is something at this place already", where=str(out), fix="Remove it, or set --out to another place."
        )
    manifest = read_manifest(checkpoint)
    verify(checkpoint, manifest, sorted(manifest.files))
    start = model or Path(manifest.config["model"]["checkpoint"])
    if not (start / "config.json").is_file():
        raise CheckpointError(
            "the checkpoint that the run started from is not there",
            where=str(checkpoint),
            got=f"no {start / 'config.json'}",
            expected="its config.json, tokenizer and untrained tensors, which a run's checkpoints do not repeat",
            fix="Give its place with --model FOLDER.",
        )
    partial = out.with_name(f"{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        learner = _learner(manifest)
        trains_vision = _has_pictures(manifest) and not learner.freeze_vision
        form = ExportForm(HfCheckpoint(start), learner.dtype, published, loss, trains_vision)
        _write(checkpoint, manifest, form, partial, shard_bytes)
    except BaseException:
        shutil.rmtree(partial)
        raise
    return partial.rename(out)


def _write(checkpoint: Path, manifest: Manifest, form: ExportForm, folder: Path, shard_bytes: int) -> None:
    start, learner = form.source.folder, _learner(manifest)
    hf = read_hf_config(start)
    reader = PieceReader(checkpoint / name for name in sorted(manifest.files) if name != STATE_FILE)

    if _has_pictures(manifest):
        tensors = _with_vision(reader, learner, form.source, where=str(checkpoint))
    else:
        tensors = _of_model(reader, hf, learner, form.source, where=str(checkpoint))
    trained = form.written(tensors)
    write_index(folder, write_files(folder, "model", chain(trained, form.kept()), shard_bytes))
    write_companions(folder, start, form.config())


def _of_model(
    reader: PieceReader, hf: Mapping[str, Any], learner: LearnerConfig, source: HfCheckpoint, *, where: str
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the model: the trained ones, then those that are as in the start checkpoint."""
    trained, constants = _saved(reader, hf, source, learner)
    written = set[str]()
    for name, tensor in trained:
        _check_shape(name, tensor, source)
        written.add(name)
        yield name, tensor
    for name in sorted(_expected(hf, source) - written):
        is_base = learner.lora.rank > 0 or is_frozen(name, learner)
        if not (is_base or name in constants or name.endswith(_CONSTANT)):
            raise _missing(name, where, len(written), source)
        yield name, source.read(name)


def _with_vision(
    reader: PieceReader, learner: LearnerConfig, source: HfCheckpoint, *, where: str
) -> Iterator[tuple[str, Tensor]]:
    """As `_of_model`, of a run with pictures, under published names; a frozen vision tower is left out."""
    from moe_trm.learner.deepspeed.saved import SavedModel

    names = source.stored_names - (source.vision if learner.freeze_vision else frozenset())
    written = set[str]()
    for name, tensor in SavedModel(source.folder, vision=True).saved_tensors(reader):
        if name not in names or source.shape(name) != tuple(tensor.shape):
            raise _another(name, tensor, source, source.shape(name) if name in names else None)
        written.add(name)
        yield name, tensor
    for name in sorted(names - written):
        if not is_frozen(name, learner):
            raise _missing(name, where, len(written), source)
        yield name, source.read(name)


def _has_pictures(manifest: Manifest) -> bool:
    return manifest.config.get("task", {}).get("image_field") is not None


def _saved(
    reader: PieceReader, hf: Mapping[str, Any], source: HfCheckpoint, learner: LearnerConfig
) -> tuple[Iterator[tuple[str, Tensor]], frozenset[str]]:
    """The trained tensors, and the names of those that no learner of this kind trains.

    With adapters, the matrices that have one, merged.
    """
    if learner.lora.rank:
        return merged_tensors(saved_factors(reader, hf, source, learner), source, learner), frozenset()
    if learner.backend == "deepspeed":
        from moe_trm.learner.deepspeed.saved import SavedModel

        saved = SavedModel(source.folder)
        return saved.saved_tensors(reader), saved.constants
    from moe_trm.learner.megatron.saved import saved_tensors

    return saved_tensors(reader, hf), frozenset()


def _learner(manifest: Manifest) -> LearnerConfig:
    """The settings of the learner that say what its checkpoint holds; others may be of another version."""
    learner = manifest.config.get("learner", {})
    return LearnerConfig(
        lora=lora_of(manifest),
        **{
            key: learner[key]
            for key in ("backend", "dtype", "freeze_router", "freeze_vision")
            if learner.get(key) is not None
        },
    )


def _expected(hf: Mapping[str, Any], source: HfCheckpoint) -> frozenset[str]:
    family = find_family(hf)
    if family is not None:
        return tensor_names(family, hf)
    return source.names - ({OUTPUT} if hf.get("tie_word_embeddings") else set())


def _check_shape(name: str, tensor: Tensor, source: HfCheckpoint) -> None:
    if name not in source.names or source.shape(name) != tuple(tensor.shape):
        raise _another(name, tensor, source, source.shape(name) if name in source.names else None)


def _another(name: str, tensor: Tensor, source: HfCheckpoint, shape: tuple[int, ...] | None) -> CheckpointError:
    return CheckpointError(
        "the checkpoint is another model's than the one it started from",
        where=name,
        got=list(tensor.shape),
        expected=f"a tensor of {source.folder}" if shape is None else list(shape),
        fix="Give the checkpoint that this run started from with --model FOLDER.",
    )


def _missing(name: str, where: str, others: int, source: HfCheckpoint) -> CheckpointError:
    return CheckpointError(
        "a trained tensor is missing from the checkpoint",
        where=f"{where}, {name}",
        got=f"{others} others",
        expected=f"every trained tensor of {source.folder}",
        fix="If the run started from another checkpoint, give its place with --model FOLDER.",
    )
