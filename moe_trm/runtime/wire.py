"""Messages between the rollout controller and the learner ranks: msgpack for structure, one raw frame per array.

Never pickle.

A message is a list of frames: the msgpack body first, then the buffers its arrays refer to by index.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np

from moe_trm.errors import ControllerError

T = TypeVar("T")

_DTYPES = frozenset({"|b1", "|u1", "<u2", "<i2", "<i4", "<i8", "<f4", "<f8"})


def encode(message: Any) -> list[bytes | memoryview]:
    """Frames of `message`: dataclasses, structs, containers and numpy arrays of the plain numeric types."""
    buffers: list[memoryview] = []

    def hook(value: object) -> object:
        if not isinstance(value, np.ndarray):
            raise TypeError(f"cannot send a {type(value).__name__}")
        if value.dtype.str not in _DTYPES:
            raise TypeError(f"cannot send an array of {value.dtype}")
        buffers.append(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
        return (len(buffers), value.dtype.str, value.shape)

    body = msgspec.msgpack.encode(message, enc_hook=hook)
    return [body, *buffers]


def decode(frames: Sequence[bytes | memoryview], kind: type[T]) -> T:
    """The message of type `kind` in `frames`; arrays are read-only views of their frames. Raises `ControllerError`."""

    def hook(expected: type, value: Any) -> object:
        if expected is not np.ndarray:
            raise TypeError(f"cannot receive a {expected.__name__}")
        index, dtype, shape = value
        if dtype not in _DTYPES or not 1 <= index < len(frames):
            raise ValueError(f"array of {dtype} in frame {index}")
        return np.frombuffer(frames[index], dtype=dtype).reshape(shape)

    if not frames:
        raise ControllerError("empty message", expected="a msgpack body")
    try:
        return msgspec.msgpack.decode(frames[0], type=kind, dec_hook=hook)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
        raise ControllerError("malformed message", got=str(error), expected=kind.__name__) from error
