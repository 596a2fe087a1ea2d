"""A Hugging Face checkpoint folder, read one tensor at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from moe_trm.errors import CheckpointError

_COMPLETE = "Copy or download the checkpoint again, completely."


class HfCheckpoint:
    """Lazy access to the safetensors of a checkpoint folder; only the tensors asked for are read from disk.

    Raises:
        CheckpointError: no safetensors, an index that names missing files, or a damaged file.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._file_of = self._index()
        self._handles: dict[str, Any] = {}

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors in the checkpoint."""
        return frozenset(self._file_of)

    def read(self, name: str) -> Tensor:
        """The tensor `name` on CPU, in the checkpoint's dtype."""
        tensor: Tensor = self._handle(name).get_tensor(name)
        return tensor

    def file_of(self, name: str) -> str:
        """The file of the folder that holds the tensor `name`."""
        return self._file_of[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the tensor `name`, whose values are not read."""
        return tuple(self._handle(name).get_slice(name).get_shape())

    def read_row(self, name: str, row: int, num_rows: int) -> Tensor:
        """Row `row` alone of the tensor `name`, which must have `num_rows` of them.

        Raises `CheckpointError` where it has not.
        """
        stacked = self._handle(name).get_slice(name)
        if stacked.get_shape()[0] != num_rows:
            raise CheckpointError(
                "tensor has another number of rows than config.json announces",
                where=f"{self.folder}, {name}",
                got=stacked.get_shape()[0],
                expected=num_rows,
                fix="Use the config.json that belongs to these weights.",
            )
        tensor: Tensor = stacked[row]
        return tensor

    def _handle(self, name: str) -> Any:
        if name not in self._file_of:
            raise CheckpointError(
                "tensor missing from the checkpoint",
                where=f"{self.folder}, {name}",
                got=f"{len(self._file_of)} other tensors",
                expected=name,
                fix="config.json asks for a tensor the files do not hold. " + _COMPLETE,
            )
        file = self._file_of[name]
        if file not in self._handles:
            self._handles[file] = self._open(file)
        return self._handles[file]

    def _index(self) -> dict[str, str]:
        index = self.folder / "model.safetensors.index.json"
        if index.is_file():
            file_of: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            for file in sorted(set(file_of.values())):
                if not (self.folder / file).is_file():
                    raise CheckpointError(
                        "checkpoint file missing",
                        where=str(self.folder),
                        got=f"no {file}",
                        expected="every file that model.safetensors.index.json names",
                        fix=_COMPLETE,
                    )
            return file_of
        if not (self.folder / "model.safetensors").is_file():
            raise CheckpointError(
                "checkpoint has no weights",
                where=str(self.folder),
                got="no safetensors",
                expected="model.safetensors, or shards with model.safetensors.index.json",
                fix=_COMPLETE,
            )
        return dict.fromkeys(self._open("model.safetensors").keys(), "model.safetensors")

    def _open(self, file: str) -> Any:
        try:
            return safe_open(self.folder / file, framework="pt", device="cpu")
        except SafetensorError as error:
            raise CheckpointError(
                "checkpoint file is damaged",
                where=str(self.folder / file),
                got=str(error),
                expected="a complete safetensors file",
                fix=_COMPLETE,
            ) from error
