"""A Hugging Face checkpoint folder written by several ranks.

Each rank writes its shard; the first also writes the index, config.json and tokenizer files.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from moe_trm.sync.disk import write_buckets, write_shard
from moe_trm.sync.manifest import TensorEntry
from moe_trm.sync.rounding import Rounding

_INDEX = "model.safetensors.index.json"
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.index.json")


class HfExporter:
    """Writes what `tensors` yields on each rank.

    Args:
        tensors: this rank's tensors under their Hugging Face names; all ranks call it together.
        hf: config.json of the checkpoint the model came from.
        source: that checkpoint's folder; config and tokenizer files are copied from it.
        dtype: of complete checkpoints.
    """

    def __init__(
        self, tensors: Callable[[], Iterator[tuple[str, Tensor]]], hf: Mapping[str, Any], source: str | Path, dtype: str
    ) -> None:
        self.tensors, self._hf, self._source, self._dtype = tensors, hf, Path(source), dtype

    def write_push(self, directory: Path, rounding: Rounding) -> tuple[TensorEntry, ...]:
        """Write this rank's tensors to files in `directory` (created if missing), one while the next is made.

        Returns their names and digests.
        """
        return write_buckets(directory, Path(_file_name(dist.get_rank())).stem, self.tensors(), rounding)

    def write_checkpoint(self, directory: Path) -> None:
        """Write a complete checkpoint to `directory`, which all ranks must see. Collective.

        It has the shards, the index, config.json and the tokenizer files.
        """
        write_shard(directory / _file_name(dist.get_rank()), self.tensors(), Rounding(self._dtype))
        dist.barrier()
        if dist.get_rank() == 0:
            files = [directory / _file_name(rank) for rank in range(dist.get_world_size())]
            write_index(directory, [file for file in files if file.is_file()])
            write_companions(directory, self._source, self._hf, self._dtype)
        dist.barrier()


def write_index(directory: Path, shards: Sequence[Path]) -> None:
    """Write the index of a checkpoint folder: the shard of every tensor."""
    weight_map: dict[str, str] = {}
    for path in shards:
        with safe_open(path, framework="pt") as shard:
            weight_map |= dict.fromkeys(shard.keys(), path.name)
    total_bytes = sum(path.stat().st_size for path in shards)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    (directory / _INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")


def write_companions(directory: Path, source: Path, hf: Mapping[str, Any], dtype: str) -> None:
    """Copy everything but weights from the folder `source`, and write config.json, with `dtype` in it."""
    weights = {path for pattern in _WEIGHTS for path in source.glob(pattern)}
    for path in source.iterdir():
        if path.is_file() and path not in weights and path.name != "config.json":
            shutil.copyfile(path, directory / path.name)
    config = {**hf, "dtype": dtype}
    config.pop("torch_dtype", None)
    (directory / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def _file_name(rank: int) -> str:
    return f"model-rank-{rank:05d}.safetensors"
