"""Tensors of a pushed safetensors file, one at a time.

`safe_open(..., framework="pt").get_tensor` of safetensors 0.5 to 0.8 never frees two integers of each tensor, 64 bytes.
A controller that proves a push of 20,000 tensors at every step would grow by more than a megabyte a step, so pushes are
read here.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import BinaryIO

import msgspec
import torch
from torch import Tensor

from moe_trm.sync.rounding import DTYPES

_LENGTH_BYTES = 8
_DTYPES = {"F32": DTYPES["float32"], "BF16": DTYPES["bfloat16"], "F16": DTYPES["float16"]}
"""Of a push, by their names in a safetensors header."""


class _Place(msgspec.Struct, frozen=True):
    """Header entry of a tensor; offsets in bytes from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def read_tensors(path: Path, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    """The tensors `names` of the safetensors file at `path`.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is damaged, lacks one of them, or has one of a dtype that is never pushed.
    """
    with path.open("rb") as file:
        places, begin = _header(file)
        size = os.fstat(file.fileno()).st_size - begin
        for name in names:
            if name not in places:
                raise ValueError(f"no tensor {name}")
            yield name, _tensor(file, name, places[name], begin, size)


def _header(file: BinaryIO) -> tuple[Mapping[str, _Place], int]:
    """Places by name, and where the first byte of data is."""
    length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    if length > os.fstat(file.fileno()).st_size - _LENGTH_BYTES:
        raise ValueError(f"a header of {length} bytes is longer than the file")
    try:
        fields = msgspec.json.decode(file.read(length), type=dict[str, msgspec.Raw])
        places = {
            name: msgspec.json.decode(field, type=_Place) for name, field in fields.items() if name != "__metadata__"
        }
    except msgspec.DecodeError as error:
        raise ValueError(f"the header is damaged: {error}") from error
    return places, _LENGTH_BYTES + length


def _tensor(file: BinaryIO, name: str, place: _Place, begin: int, size: int) -> Tensor:
    first, last = place.data_offsets
    dtype = _DTYPES.get(place.dtype)
    fits = dtype is not None and min(place.shape, default=0) >= 0 and prod(place.shape) * dtype.itemsize == last - first
    if dtype is None or not fits or not 0 <= first < last <= size:
        raise ValueError(f"the place of {name} is impossible: {place}, {size} bytes of data")
    data = bytearray(last - first)
    file.seek(begin + first)
    if file.readinto(data) != len(data):  # type: ignore[attr-defined]
        raise ValueError(f"the file ends within {name}")
    return torch.frombuffer(data, dtype=dtype).reshape(place.shape)
