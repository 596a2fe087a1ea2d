"""A Hugging Face folder written tensor by tensor, in files of bounded size."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from moe_trm.learner.hf_export import write_companions, write_index
from moe_trm.sync.rounding import Rounding

SHARD_BYTES = 4 << 30
"""Bytes of one file at most, apart from a larger tensor; they are held until it is written."""


class ShardWriter:
    """Collects tensors and writes a file whenever there are enough.

    Args:
        folder: an empty one.
        dtype: of the weights; biases that choose experts stay float32, as in every export.
        shard_bytes: of one file at most.
    """

    def __init__(self, folder: Path, dtype: str, shard_bytes: int = SHARD_BYTES) -> None:
        self._folder, self._rounding, self._shard_bytes = folder, Rounding(dtype), shard_bytes
        self._held: dict[str, Tensor] = {}
        self._files: list[Path] = []

    def add(self, name: str, tensor: Tensor) -> None:
        """Take a tensor under its Hugging Face name, cast as a learner's export casts it."""
        cast = self._rounding.pushed(name, tensor)
        if self._held and sum(held.nbytes for held in self._held.values()) + cast.nbytes > self._shard_bytes:
            self._write()
        self._held[name] = cast

    def finish(self, source: Path, hf: Mapping[str, Any]) -> None:
        """Write the rest, the index, config.json (`hf`), and what else lies in the folder `source`."""
        if self._held:
            self._write()
        write_index(self._folder, self._files)
        write_companions(self._folder, source, hf, self._rounding.dtype)

    def _write(self) -> None:
        path = self._folder / f"model-{len(self._files) + 1:05d}.safetensors"
        save_file(self._held, path, metadata={"format": "pt"})
        self._files.append(path)
        self._held = {}
