"""Messages between the rollout controller and the learner ranks: msgpack for structure, raw frames for arrays.

Never pickle.

A message is a list of frames: the msgpack body first, then the buffers its arrays refer to by index. The first of these
holds all small arrays together: a record has ten of them, and a frame costs more than what is in it.

An array is `(index, dtype, shape)`, with its first byte in the frame of small arrays (index 1).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from math import prod
from typing import Any, TypeVar

import msgspec
import numpy as np

from moe_trm.errors import ControllerError

T = TypeVar("T")

SMALL_BYTES = 1 << 12
"""Arrays below go into one frame."""
_ALIGNMENT = 8
_EXAMINING = threading.Lock()
_EXAMINED = set[type]()
"""Types that msgspec has taken apart. It keeps the parts with the type before they are complete: a second thread that
decodes meanwhile reads them, and the process ends by a segmentation fault (0.22.0)."""
_DTYPES = {name: np.dtype(name) for name in ("|b1", "|u1", "<u2", "<i2", "<i4", "<i8", "<f4", "<f8")}


def encode(message: Any) -> list[bytes | memoryview]:
    """Frames of `message`: dataclasses, structs, containers and numpy arrays of the plain numeric types."""
    small, buffers, num_small = bytearray(), list[memoryview](), 0

    def hook(value: object) -> object:
        nonlocal num_small
        if not isinstance(value, np.ndarray):
            raise TypeError(f"cannot send a {type(value).__name__}")
        name = value.dtype.str
        if name not in _DTYPES:
            raise TypeError(f"cannot send an array of {value.dtype}")
        if value.nbytes < SMALL_BYTES:
            start, num_small = len(small), num_small + 1
            small.extend(value.tobytes())
            small.extend(bytes(-len(small) % _ALIGNMENT))
            return (1, name, value.shape, start)
        buffers.append(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
        return (1 + len(buffers), name, value.shape)

    body = msgspec.msgpack.encode(message, enc_hook=hook)
    return [body, *([memoryview(small).toreadonly()] if num_small or buffers else []), *buffers]


def decode(frames: Sequence[bytes | memoryview], kind: type[T]) -> T:
    """The message of type `kind` in `frames`; arrays are read-only views of their frames. Raises `ControllerError`."""

    small = memoryview(frames[1]) if len(frames) > 1 else None
    typed = {} if small is None else {name: _typed(small, dtype) for name, dtype in _DTYPES.items()}

    def hook(expected: type, value: Any) -> object:
        if expected is not np.ndarray:
            raise TypeError(f"cannot receive a {expected.__name__}")
        index, name, shape, *further = value
        dtype = _DTYPES.get(name)
        if dtype is None:
            raise ValueError(f"array of {name}")
        if index == 1 and small is not None and len(further) == 1:
            # Nearly all arrays of a step are here: no step more than needed.
            (first,), buffer, size = further, typed[name], dtype.itemsize
            count = prod(shape)
            if type(first) is not int or first % size or not 0 <= first <= first + count * size <= buffer.nbytes:
                raise ValueError(f"array of {name} and shape {shape} at {first} of {len(small)} bytes")
            part = buffer[first // size : first // size + count]
            return part if len(shape) == 1 else part.reshape(shape)
        if further or not 2 <= index < len(frames):
            raise ValueError(f"array of {name} in frame {index}")
        return np.frombuffer(frames[index], dtype=dtype).reshape(shape)

    if not frames:
        raise ControllerError("empty message", expected="a msgpack body")
    if kind not in _EXAMINED:
        with _EXAMINING:
            msgspec.msgpack.Decoder(kind)
            _EXAMINED.add(kind)
    try:
        return msgspec.msgpack.decode(frames[0], type=kind, dec_hook=hook)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
        raise ControllerError("malformed message", got=str(error), expected=kind.__name__) from error


def _typed(small: memoryview, dtype: np.dtype) -> np.ndarray:
    """All that fits into the frame of small arrays, as values of one type."""
    return np.frombuffer(small, dtype, len(small) // dtype.itemsize)
