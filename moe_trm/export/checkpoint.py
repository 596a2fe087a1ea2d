"""A Hugging Face folder from a checkpoint of any learner in any layout, made by one process without ranks."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from moe_trm.checkpoint.folder import STATE_FILE, Manifest, read_manifest, verify
from moe_trm.checkpoint.pieces import PieceReader
from moe_trm.config.schema import LearnerConfig
from moe_trm.errors import CheckpointError
from moe_trm.export.adapter import lora_of, merged_tensors, saved_factors
from moe_trm.export.shards import SHARD_BYTES, ShardWriter
from moe_trm.learner.hf_checkpoint import HfCheckpoint
from moe_trm.learner.parameter_groups import is_frozen
from moe_trm.models.hf_config import read_hf_config, without_prediction_layers
from moe_trm.models.registry import find_family
from moe_trm.models.tensors import OUTPUT, tensor_names

_CONSTANT = ".e_score_correction_bias"


def export_checkpoint(
    checkpoint: Path, out: Path, *, model: Path | None = None, shard_bytes: int = SHARD_BYTES
) -> Path:
    """Write the weights of `checkpoint` as a Hugging Face folder, in the learner's dtype, and return the folder.

    They are those that the learner itself would have exported at that step, bit for bit. Adapters are merged: equal up
    to the rounding of a float32 product. What was not trained (a
    frozen router, biases that choose experts) is as in the checkpoint that the run started from. Config and tokenizer
    are that one's, too.

    Args:
        checkpoint: a `step-NNNNNN` folder.
        out: the folder to write, which must not exist; it appears when it is complete.
        model: where the start checkpoint lies now; None: where the run found it.
        shard_bytes: see `ShardWriter`.

    Raises:
        CheckpointError: `out` exists; the checkpoint is damaged or of another format; the start checkpoint is not
            there, or is another model's.
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
        _write(checkpoint, manifest, start, partial, shard_bytes)
    except BaseException:
        shutil.rmtree(partial)
        raise
    return partial.rename(out)


def _write(checkpoint: Path, manifest: Manifest, start: Path, folder: Path, shard_bytes: int) -> None:
    hf, source, learner = read_hf_config(start), HfCheckpoint(start), _learner(manifest)
    reader = PieceReader(checkpoint / name for name in sorted(manifest.files) if name != STATE_FILE)
    writer, written = ShardWriter(folder, learner.dtype, shard_bytes), set[str]()
    trained, constants = _saved(reader, hf, start, learner)
    for name, tensor in trained:
        _check_shape(name, tensor, source)
        writer.add(name, tensor)
        written.add(name)
    for name in sorted(_expected(hf, source) - written):
        is_base = learner.lora.rank > 0 or is_frozen(name, learner)
        if not (is_base or name in constants or name.endswith(_CONSTANT)):
            raise CheckpointError(
                "a trained tensor is missing from the checkpoint",
                where=f"{checkpoint}, {name}",
                got=f"{len(written)} others",
                expected=f"every trained tensor of {start}",
                fix="If the run started from another checkpoint, give its place with --model FOLDER.",
            )
        writer.add(name, source.read(name))
    writer.finish(start, without_prediction_layers(hf))


def _saved(
    reader: PieceReader, hf: Mapping[str, Any], start: Path, learner: LearnerConfig
) -> tuple[Iterator[tuple[str, Tensor]], frozenset[str]]:
    """The trained tensors, and the names of those that no learner of this kind trains.

    With adapters, the matrices that have one, merged.
    """
    if learner.lora.rank:
        source = HfCheckpoint(start)
        return merged_tensors(saved_factors(reader, hf, source, learner), source, learner), frozenset()
    if learner.backend == "deepspeed":
        from moe_trm.learner.deepspeed.saved import SavedModel

        saved = SavedModel(start)
        return saved.saved_tensors(reader), saved.constants
    from moe_trm.learner.megatron.saved import saved_tensors

    return saved_tensors(reader, hf), frozenset()


def _learner(manifest: Manifest) -> LearnerConfig:
    """The settings of the learner that say what its checkpoint holds; others may be of another version."""
    learner = manifest.config.get("learner", {})
    return LearnerConfig(
        lora=lora_of(manifest),
        **{key: learner[key] for key in ("backend", "dtype", "freeze_router") if learner.get(key) is not None},
    )


def _expected(hf: Mapping[str, Any], source: HfCheckpoint) -> frozenset[str]:
    family = find_family(hf)
    if family is not None:
        return tensor_names(family, hf)
    return source.names - ({OUTPUT} if hf.get("tie_word_embeddings") else set())


def _check_shape(name: str, tensor: Tensor, source: HfCheckpoint) -> None:
    if name not in source.names or source.shape(name) != tuple(tensor.shape):
        raise CheckpointError(
            "the checkpoint is another model's than the one it started from",
            where=name,
            got=list(tensor.shape),
            expected=list(source.shape(name)) if name in source.names else f"a tensor of {source.folder}",
            fix="Give the checkpoint that this run started from with --model FOLDER.",
        )
