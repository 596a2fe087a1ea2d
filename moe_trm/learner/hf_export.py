"""A Hugging Face checkpoint folder written by several ranks.

Each rank writes its shard; the first also writes what nothing trains, the index, config.json and tokenizer files.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from moe_trm.learner.hf_form import ExportForm
from moe_trm.sync.disk import write_buckets
from moe_trm.sync.manifest import TensorEntry
from moe_trm.sync.rounding import Rounding

SHARD_BYTES = 4 << 30
"""Bytes of one file at most, apart from a larger tensor, where a process writes several; they are held until then."""

_INDEX = "model.safetensors.index.json"
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.index.json")


class HfExporter:
    """Writes what `tensors` yields on each rank.

    Args:
        tensors: this rank's tensors under their Hugging Face names; all ranks call it together.
        form: of complete checkpoints; config and tokenizer files are copied from its source.
    """

    def __init__(self, tensors: Callable[[], Iterator[tuple[str, Tensor]]], form: ExportForm) -> None:
        self.tensors, self._form = tensors, form

    def write_push(self, directory: Path, rounding: Rounding) -> tuple[TensorEntry, ...]:
        """Write this rank's tensors to files in `directory` (created if missing), one while the next is made.

        Returns their names and digests.
        """
        return write_buckets(directory, Path(_file_name(dist.get_rank())).stem, self.tensors(), rounding)

    def write_checkpoint(self, directory: Path) -> None:
        """Write a complete checkpoint to `directory`, which all ranks must see. Collective.

        It has the shards, the index, config.json and the tokenizer files.
        """
        directory.mkdir(parents=True, exist_ok=True)
        stored = dict(self._form.written(self.tensors()))
        save_file(stored, directory / _file_name(dist.get_rank()), metadata={"format": "pt"})
        del stored
        dist.barrier()
        if dist.get_rank() == 0:
            files = [directory / _file_name(rank) for rank in range(dist.get_world_size())]
            files += write_files(directory, "model-kept", self._form.kept())
            write_index(directory, [file for file in files if file.is_file()])
            write_companions(directory, self._form.source.folder, self._form.config())
        dist.barrier()


def write_files(
    folder: Path, name: str, tensors: Iterable[tuple[str, Tensor]], file_bytes: int = SHARD_BYTES
) -> list[Path]:
    """Write tensors to files `name`-00001.safetensors and so on; return them."""
    files, held = list[Path](), dict[str, Tensor]()

    def write() -> None:
        files.append(folder / f"{name}-{len(files) + 1:05d}.safetensors")
        save_file(held, files[-1], metadata={"format": "pt"})
        held.clear()

    for key, tensor in tensors:
        if held and sum(entry.nbytes for entry in held.values()) + tensor.nbytes > file_bytes:
            write()
        held[key] = tensor.contiguous()
    if held:
        write()
    return files


def write_index(directory: Path, shards: Sequence[Path]) -> None:
    """Write the index of a checkpoint folder: the shard of every tensor."""
    weight_map: dict[str, str] = {}
    for path in shards:
        with safe_open(path, framework="pt") as shard:
            weight_map |= dict.fromkeys(shard.keys(), path.name)
    total_bytes = sum(path.stat().st_size for path in shards)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    (directory / _INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")


def write_companions(directory: Path, source: Path, config: Mapping[str, Any]) -> None:
    """Write config.json, and copy everything else but weights from the folder `source`."""
    weights = {path for pattern in _WEIGHTS for path in source.glob(pattern)}
    for path in source.iterdir():
        if path.is_file() and path not in weights and path.name != "config.json":
            shutil.copyfile(path, directory / path.name)
    (directory / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def _file_name(rank: int) -> str:
    return f"model-rank-{rank:05d}.safetensors"
