"""Pushed safetensors files: written from where the tensors are, and read each by its name, in any thread.

`safe_open(..., framework="pt").get_tensor` of safetensors 0.5 to 0.8 never frees two integers of each tensor, 64 bytes.
A controller that proves a push of 20,000 tensors at every step would grow by more than a megabyte a step, so pushes are
read here.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from io import FileIO
from itertools import islice
from math import prod
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from moe_trm.sync.rounding import DTYPES
from moe_trm.sync.tensors import tensor_bytes

_LENGTH_BYTES = 8
_DTYPES = {"F32": DTYPES["float32"], "BF16": DTYPES["bfloat16"], "F16": DTYPES["float16"]}
"""Dtypes of a push, by their names in a safetensors header."""
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_MOST_BUFFERS = 512
"""Buffers of one call of the system, which takes 1,024."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """A file of these tensors, of the dtypes of a push. Wide types come first, so that every tensor is aligned.

    The writer of safetensors takes as long for the names and addresses of small tensors as for all of their bytes.
    """
    order = _order(tensors)
    _write_file(path, _places(order, tensors), [tensor_bytes(tensors[name]) for name in order])


def write_joined(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, memoryview]:
    """As `write_tensors`, for small tensors: they are copied side by side first, and written in one piece.

    Returns the bytes of each.
    """
    order = _order(tensors)
    places = _places(order, tensors)
    kinds = dict.fromkeys(tensors[name].dtype for name in order)
    joined = [
        tensor_bytes(torch.cat([tensors[name].detach().reshape(-1) for name in order if tensors[name].dtype == kind]))
        for kind in kinds
    ]
    _write_file(path, places, joined)
    buffer = joined[0] if len(joined) == 1 else memoryview(b"".join(joined))
    return {name: buffer[slice(*place.data_offsets)] for name, place in places.items()}


def _order(tensors: Mapping[str, Tensor]) -> list[str]:
    """Wide types first, each type together."""
    return sorted(tensors, key=lambda name: (-tensors[name].itemsize, _NAMES[tensors[name].dtype]))


def _places(order: Sequence[str], tensors: Mapping[str, Tensor]) -> dict[str, _Place]:
    places: dict[str, _Place] = {}
    end = 0
    for name in order:
        begin, end = end, end + tensors[name].nbytes
        places[name] = _Place(_NAMES[tensors[name].dtype], tuple(tensors[name].shape), (begin, end))
    return places


def _write_file(path: Path, places: Mapping[str, _Place], buffers: Iterable[memoryview]) -> None:
    header = msgspec.json.encode({"__metadata__": {"format": "pt"}, **places})
    header += b" " * (-len(header) % _LENGTH_BYTES)
    with path.open("wb", buffering=0) as file:
        _write_all(file.fileno(), [len(header).to_bytes(_LENGTH_BYTES, "little"), header, *buffers])


def _write_all(file: int, buffers: Iterable[bytes | memoryview]) -> None:
    """One call of the system writes 2 GiB at most, and may write less than it is given."""
    waiting = deque(memoryview(buffer) for buffer in buffers)
    while waiting:
        written = os.writev(file, list(islice(waiting, _MOST_BUFFERS)))
        while waiting and written >= len(waiting[0]):
            written -= len(waiting.popleft())
        if written:
            waiting[0] = waiting[0][written:]


class _Place(msgspec.Struct, frozen=True):
    """Header entry of a tensor; offsets in bytes from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class Stored(NamedTuple):
    """The bytes of a tensor, and what they are."""

    data: memoryview
    dtype: torch.dtype
    shape: tuple[int, ...]


class _Slot(NamedTuple):
    """A tensor of a file: its dtype, its shape, and its bytes, counted from the end of the header."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


class Memory:
    """Bytes that one tensor after the other is read into: new ones cost as much as the copy."""

    def __init__(self) -> None:
        self._bytes = np.empty(0, np.uint8).data

    def take(self, size: int) -> memoryview:
        """`[size]`, the same as before if they are enough: what was read into them is gone."""
        if len(self._bytes) < size:
            self._bytes = np.empty(size, np.uint8).data
        return self._bytes[:size]


class Shard:
    """An open safetensors file of `num_bytes` in all. Several threads may read it at the same time.

    Raises `OSError` where it cannot be opened, `ValueError` where its header is damaged.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb", buffering=0)
        try:
            self.num_bytes = os.fstat(self._file.fileno()).st_size
            header = _header(self._file, self.num_bytes)
            self._slots, self._begin = _slots(header), _LENGTH_BYTES + len(header)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Shard:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def tensor(self, name: str) -> Tensor:
        """The tensor `name`. Raises as `read` does."""
        stored = self.read(name, Memory())
        return torch.frombuffer(stored.data, dtype=stored.dtype).reshape(stored.shape)

    def read(self, name: str, memory: Memory) -> Stored:
        """The bytes of the tensor `name`, in `memory` of the calling thread.

        Raises:
            OSError: the file cannot be read.
            ValueError: it lacks the tensor, ends within it, or has it at a place or in a dtype that is never pushed.
        """
        slot = self._slots.get(name)
        if slot is None:
            raise ValueError(f"no tensor {name}")
        size = self.num_bytes - self._begin
        if isinstance(slot, _Place) or slot.end > size:
            raise ValueError(f"the place of {name} is impossible: {slot}, {size} bytes of data")
        data = memory.take(slot.end - slot.begin)
        if _read_into(self._file.fileno(), data, self._begin + slot.begin) != len(data):
            raise ValueError(f"the file ends within {name}")
        return Stored(data, slot.dtype, slot.shape)


def _read_into(file: int, data: memoryview, offset: int) -> int:
    """Bytes read: one call of the system reads 2 GiB at most."""
    read = 0
    while read < len(data) and (count := os.preadv(file, [data[read:]], offset + read)):
        read += count
    return read


def _header(file: FileIO, size: int) -> bytes:
    length = int.from_bytes(file.read(_LENGTH_BYTES) or b"", "little")
    if length > size - _LENGTH_BYTES:
        raise ValueError(f"a header of {length} bytes is longer than the file")
    return file.read(length) or b""


@lru_cache(maxsize=4)
def _slots(header: bytes) -> Mapping[str, _Slot | _Place]:
    """The tensors of a file by name; a place where no tensor of a push can be stays one.

    From push to push a rank writes the same header.
    """
    try:
        fields = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        places = {
            name: msgspec.json.decode(field, type=_Place) for name, field in fields.items() if name != "__metadata__"
        }
    except msgspec.DecodeError as error:
        raise ValueError(f"the header is damaged: {error}") from error
    return {name: _slot(place) for name, place in places.items()}


def _slot(place: _Place) -> _Slot | _Place:
    dtype, (begin, end) = _DTYPES.get(place.dtype), place.data_offsets
    if dtype is None or min(place.shape, default=0) < 0 or prod(place.shape) * dtype.itemsize != end - begin:
        return place
    return _Slot(dtype, place.shape, begin, end) if 0 <= begin < end else place
