"""Messages between the rollout controller and the learner ranks: msgpack for structure, one raw frame per array.

Never pickle.

A message is a list of frames: the msgpack body first, then the buffers its arrays refer to by index. An array that lies
in shared memory may go as its place instead, for a receiver on the same machine to copy from there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np

from moe_trm.errors import ControllerError
from moe_trm.runtime.shared_blocks import Place, PlaceReader

T = TypeVar("T")

_DTYPES = frozenset({"|b1", "|u1", "<u2", "<i2", "<i4", "<i8", "<f4", "<f8"})


def encode(message: Any, lend: Callable[[np.ndarray], Place | None] | None = None) -> list[bytes | memoryview]:
    """Frames of `message`: dataclasses, structs, containers and numpy arrays of the plain numeric types.

    `lend` names the place of arrays that the receiver reads in shared memory (`shared_blocks.place_of`).
    """
    buffers: list[memoryview] = []

    def hook(value: object) -> object:
        if not isinstance(value, np.ndarray):
            raise TypeError(f"cannot send a {type(value).__name__}")
        if value.dtype.str not in _DTYPES:
            raise TypeError(f"cannot send an array of {value.dtype}")
        if lend is not None and (place := lend(value)) is not None:
            return (0, value.dtype.str, value.shape, place)
        buffers.append(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
        return (len(buffers), value.dtype.str, value.shape)

    body = msgspec.msgpack.encode(message, enc_hook=hook)
    return [body, *buffers]


def decode(frames: Sequence[bytes | memoryview], kind: type[T], places: PlaceReader | None = None) -> T:
    """The message of type `kind` in `frames`; arrays are read-only views of their frames.

    `places` copies the arrays that came as places; without it they are refused. Raises `ControllerError`.
    """

    def hook(expected: type, value: Any) -> object:
        if expected is not np.ndarray:
            raise TypeError(f"cannot receive a {expected.__name__}")
        index, dtype, shape, *lent = value
        if dtype not in _DTYPES:
            raise ValueError(f"array of {dtype}")
        if places is not None and index == 0 and len(lent) == 1:
            return np.frombuffer(places.read(msgspec.convert(lent[0], Place)), dtype=dtype).reshape(shape)
        if lent or not 1 <= index < len(frames):
            raise ValueError(f"array of {dtype} in frame {index}")
        return np.frombuffer(frames[index], dtype=dtype).reshape(shape)

    if not frames:
        raise ControllerError("empty message", expected="a msgpack body")
    try:
        return msgspec.msgpack.decode(frames[0], type=kind, dec_hook=hook)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
        raise ControllerError("malformed message", got=str(error), expected=kind.__name__) from error
