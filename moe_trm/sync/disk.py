"""Weight pushes through files, the learner's side: write shards, complete the folder.

A push folder `.../vNNNNNN` holds one safetensors shard per writing rank, the index, config.json, the tokenizer files
and the manifest `push.json`. The manifest is written last: a folder without it is not a push.

The chain of proof: digest of the writer's memory = digest of the file's tensor (read here) -> checksums computed from
those very bytes = checksums that the engine reports of the loaded tensors.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

import msgspec
from safetensors.torch import save_file
from torch import Tensor

from moe_trm.errors import CheckpointError, SyncError
from moe_trm.sync.manifest import TensorEntry, WeightPush
from moe_trm.sync.rounding import Rounding
from moe_trm.sync.tensors import tensor_digest

MANIFEST = "push.json"
INDEX = "model.safetensors.index.json"
KEPT_PUSHES = 2

_PUSH_FOLDER = re.compile(r"v(\d+)")
_WEIGHT_FILES = re.compile(r".*\.(safetensors|bin|pt|pth|index\.json)")


def write_shard(path: Path, tensors: Iterable[tuple[str, Tensor]], rounding: Rounding) -> tuple[TensorEntry, ...]:
    """Round, digest from memory, and write one shard.

    Args:
        path: the file; its folder is made.
        tensors: Hugging Face names and values; they are all held until written.
        rounding: of the weights.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    pushed = {name: rounding.pushed(name, tensor) for name, tensor in tensors}
    entries = tuple(
        TensorEntry(name, path.name, rounding.dtype_of(name), tuple(tensor.shape), tensor_digest(tensor))
        for name, tensor in pushed.items()
    )
    save_file(pushed, path, metadata={"format": "pt"})
    return entries


def finish_push(directory: str, entries: tuple[TensorEntry, ...], version: int, checkpoint: str) -> WeightPush:
    """Complete a push folder whose shards are written, and delete all pushes but the last two.

    Args:
        directory: the push folder, named `vNNNNNN`.
        entries: of all shards together; each tensor once.
        version: of these weights.
        checkpoint: folder whose config.json and tokenizer files the engine gets.

    Raises:
        SyncError: a tensor is pushed twice, or a shard is not there.
        CheckpointError: `checkpoint` has no config.json.
    """
    folder = Path(directory)
    weight_map = {entry.name: entry.file for entry in entries}
    if len(weight_map) != len(entries):
        names = [entry.name for entry in entries]
        raise SyncError(
            "a tensor is pushed by two ranks",
            where=directory,
            got=sorted({name for name in names if names.count(name) > 1})[:5],
        )
    absent = sorted(file for file in set(weight_map.values()) if not (folder / file).is_file())
    if absent:
        raise SyncError(
            "shards of the push are missing", where=directory, got=absent, expected="every file that the ranks reported"
        )
    for stray in folder.glob("*.safetensors"):
        if stray.name not in weight_map.values():
            stray.unlink()
    _copy_companions(Path(checkpoint), folder)
    size = sum((folder / file).stat().st_size for file in set(weight_map.values()))
    _write_whole(folder / INDEX, json.dumps({"metadata": {"total_size": size}, "weight_map": weight_map}).encode())
    push = WeightPush(version, directory, entries)
    _write_whole(folder / MANIFEST, msgspec.json.encode(push))
    _delete_old(folder, version)
    return push


def _copy_companions(checkpoint: Path, folder: Path) -> None:
    if not (checkpoint / "config.json").is_file():
        raise CheckpointError(
            "no config.json to push", where=str(checkpoint), expected="the checkpoint folder that training started from"
        )
    for path in checkpoint.iterdir():
        if path.is_file() and not _WEIGHT_FILES.fullmatch(path.name):
            data = path.read_bytes()
            _write_whole(folder / path.name, _plain(data) if path.name == "config.json" else data)


def _plain(config: bytes) -> bytes:
    """config.json of pushed tensors, which are plain also where those of the checkpoint are FP8 or MXFP4."""
    data = json.loads(config)
    return config if data.pop("quantization_config", None) is None else json.dumps(data, indent=2).encode()


def _write_whole(path: Path, data: bytes) -> None:
    """A reader sees the old file or the whole new one."""
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(data)
    os.replace(partial, path)


def _delete_old(folder: Path, version: int) -> None:
    """Remove sibling pushes, also those that an earlier run of the same name left behind."""
    for sibling in folder.parent.iterdir():
        number = _PUSH_FOLDER.fullmatch(sibling.name)
        if number and not 0 <= version - int(number[1]) < KEPT_PUSHES:
            shutil.rmtree(sibling)
