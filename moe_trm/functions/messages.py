"""Messages between a run and the process of a user's function, over pipes: length-prefixed msgpack, never pickle."""

from __future__ import annotations

from numbers import Real
from typing import Any

import msgspec

from moe_trm.runtime.frames import frame


class Hello(msgspec.Struct, tag=True, frozen=True):
    """To the process, once.

    `function` and `adapter` are names for `load_function`; `key` is where `function` stands in the configuration.
    """

    function: str
    adapter: str
    key: str
    limit_s: float


class Call(msgspec.Struct, tag=True, frozen=True):
    """To the process: call the function. `number` is positive and never used again."""

    number: int
    payload: Any


class Cancel(msgspec.Struct, tag=True, frozen=True):
    """To the process: nobody waits for this call any more."""

    number: int


class Reply(msgspec.Struct, tag=True, frozen=True):
    """To the process: the answer to an `Ask`. `error`: `ended` or `usage` with a text as value, or empty."""

    number: int
    ask: int
    value: Any
    error: str = ""


class Ready(msgspec.Struct, tag=True, frozen=True):
    """From the process, once: the function is loaded.

    `batched`: it takes lists. `concurrent`: several calls may be open at once. `place`: file and line of the function.
    """

    batched: bool
    concurrent: bool
    place: str = ""


class Broken(msgspec.Struct, tag=True, frozen=True):
    """From the process instead of `Ready`: the parts of a `ConfigError`."""

    what: str
    where: str
    got: str
    expected: str
    fix: str


class Ask(msgspec.Struct, tag=True, frozen=True):
    """From the process: the function wants something of the run, e.g. of its session."""

    number: int
    ask: int
    op: str
    arguments: dict[str, Any]


class Done(msgspec.Struct, tag=True, frozen=True):
    """From the process: the function returned."""

    number: int
    value: Any


class Failed(msgspec.Struct, tag=True, frozen=True):
    """From the process: it did not. `reason`: `error` (it raised), `timeout`, `type` (returned what cannot be sent)."""

    number: int
    reason: str
    text: str


ToProcess = Hello | Call | Cancel | Reply
FromProcess = Ready | Broken | Ask | Done | Failed


def pack(message: ToProcess | FromProcess) -> bytes:
    """One frame.

    Raises `TypeError` or `OverflowError` for a value that is no plain data; numbers of other libraries become floats.
    """
    return frame(message, _number)


def _number(value: object) -> float:
    if isinstance(value, Real):
        return float(value)
    raise TypeError(f"a {type(value).__name__} cannot be sent")
