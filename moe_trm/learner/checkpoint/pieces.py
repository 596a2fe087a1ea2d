"""Tensors saved in parts by the ranks that hold them, and read back whole, for any parallel layout.

A rank holds a box of a global tensor: its tensor-parallel share, usually all of it. Its share of the optimizer's state
is a range of the flattened box. Both are saved with the values, so a reader on any layout can assemble the global
tensor. There is one safetensors file per rank. Its metadata has one JSON list under `pieces`; entry `i` describes the
1-D tensor named `i`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from moe_trm.errors import CheckpointError


class Place(msgspec.Struct, frozen=True):
    """Position of a piece: from element `start` of a flattened box.

    The box has shape `box` and lies at `offset` in the tensor `name` of `global_shape`.
    """

    name: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    box: tuple[int, ...]
    start: int = 0


@dataclass(frozen=True)
class Piece:
    """Part of a global tensor that one rank holds. `values` is 1-D, contiguous, in host memory."""

    place: Place
    values: Tensor


def whole(name: str, values: Tensor) -> Piece:
    """A tensor that one rank holds completely."""
    shape = tuple(values.shape)
    return Piece(Place(name, shape, (0,) * len(shape), shape), to_host(values))


def to_host(values: Tensor) -> Tensor:
    """A flat copy in host memory, which training no longer touches."""
    return values.detach().to("cpu", copy=True).reshape(-1)


def write_pieces(path: Path, pieces: Sequence[Piece]) -> None:
    """Write `pieces` to one file."""
    table = msgspec.json.encode([piece.place for piece in pieces]).decode()
    save_file({str(i): piece.values for i, piece in enumerate(pieces)}, path, metadata={"pieces": table})


class PieceReader:
    """Reads tensors out of the files that ranks wrote; only what is asked for is read from disk.

    Raises:
        CheckpointError: a file that is no file of pieces.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self._where = ""
        self._found: dict[str, list[tuple[Any, str, Place]]] = defaultdict(list)
        for path in paths:
            self._where = str(path.parent)
            try:
                file: Any = safe_open(path, framework="pt", device="cpu")
                table = msgspec.json.decode((file.metadata() or {}).get("pieces", ""), type=list[Place])
            except (SafetensorError, msgspec.DecodeError, OSError) as error:
                raise _damaged(str(path), str(error)) from error
            for number, place in enumerate(table):
                self._found[place.name].append((file, str(number), place))

    def __contains__(self, name: str) -> bool:
        return name in self._found

    def names(self, prefix: str) -> list[str]:
        """The tensors whose names begin with `prefix`, sorted."""
        return sorted(name for name in self._found if name.startswith(prefix))

    def read(self, name: str, shape: Sequence[int] | None = None) -> Tensor:
        """The whole tensor `name`, of the required `shape` if one is given.

        Raises `CheckpointError` for no such tensor, another shape, or elements that no rank saved.
        """
        pieces = self._found.get(name)
        if not pieces:
            raise CheckpointError(
                "the checkpoint does not hold this tensor",
                where=f"{self._where}, {name}",
                got=f"{len(self._found)} other tensors",
                expected=name,
                fix="Resume with the model that the checkpoint was made with.",
            )
        saved = pieces[0][2].global_shape
        if shape is not None and saved != tuple(shape):
            raise CheckpointError(
                "the checkpoint holds a tensor of another shape",
                where=f"{self._where}, {name}",
                got=list(saved),
                expected=list(shape),
                fix="Resume with the model that the checkpoint was made with.",
            )
        result: Tensor | None = None
        covered = torch.zeros(saved, dtype=torch.bool)
        for file, key, place in pieces:
            values = self._values(file, key, place, saved)
            result = torch.empty(saved, dtype=values.dtype) if result is None else result
            _put(result, place, values)
            _put(covered, place, torch.ones_like(values, dtype=torch.bool))
        assert result is not None
        if not bool(covered.all()):
            raise _damaged(f"{self._where}, {name}", f"{int((~covered).sum())} of {covered.numel()} elements missing")
        return result

    def _values(self, file: Any, key: str, place: Place, shape: tuple[int, ...]) -> Tensor:
        try:
            values: Tensor = file.get_tensor(key)
        except SafetensorError as error:
            raise _damaged(f"{self._where}, {place.name}", str(error)) from error
        inside = len(place.offset) == len(place.box) == len(shape) and all(
            first >= 0 and size >= 0 and first + size <= total
            for first, size, total in zip(place.offset, place.box, shape, strict=True)
        )
        fits = values.dim() == 1 and 0 <= place.start <= math.prod(place.box) - values.numel()
        if place.global_shape != shape or not inside or not fits:
            raise _damaged(f"{self._where}, {place.name}", f"a piece that does not fit: {place}")
        return values


def _put(target: Tensor, place: Place, values: Tensor) -> None:
    part = target[tuple(slice(first, first + size) for first, size in zip(place.offset, place.box, strict=True))]
    flat = part.clone(memory_format=torch.contiguous_format).view(-1)
    flat[place.start : place.start + values.numel()] = values
    part.copy_(flat.view(place.box))


def _damaged(where: str, how: str) -> CheckpointError:
    return CheckpointError(
        "the checkpoint is damaged",
        where=where,
        got=how,
        expected="the files as they were written",
        fix="Remove this checkpoint; the one before it will be used.",
    )
