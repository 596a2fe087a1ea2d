"""Messages between a process and a child that works for it, over pipes: length-prefixed msgpack, never pickle.

Users' functions (`moe_trm.runtime.functions`) are such children. A payload, a value and the settings are plain data;
the sender defines their form.
"""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any

import msgspec

from moe_trm.errors import MoeTrmError
from moe_trm.runtime.frames import frame

_FIELDS = ("what", "where", "got", "expected", "fix")
_LONGEST_TEXT = 2000


class Problem(msgspec.Struct, frozen=True):
    """The parts of an error.

    `kind` names its type, or the way in which a call failed. `further`: attributes that its type has beside the parts.
    """

    kind: str
    what: str
    where: str = ""
    got: str | None = None
    expected: str | None = None
    fix: str = ""
    further: dict[str, Any] = {}


class Hello(msgspec.Struct, tag=True, frozen=True):
    """To the child, once: what it needs in order to begin."""

    settings: Any


class Call(msgspec.Struct, tag=True, frozen=True):
    """To the child: work on this. `number` is positive and never used again."""

    number: int
    payload: Any


class Cancel(msgspec.Struct, tag=True, frozen=True):
    """To the child: this call is no longer awaited."""

    number: int


class Reply(msgspec.Struct, tag=True, frozen=True):
    """To the child: the answer to an `Ask`. `error`: the kind of a refusal with a text as value, or empty."""

    number: int
    ask: int
    value: Any
    error: str = ""


class Ping(msgspec.Struct, tag=True, frozen=True):
    """To the child: let the event loop say that it goes round."""


class Ready(msgspec.Struct, tag=True, frozen=True):
    """From the child, once: it can be called. `value`: what it says of itself."""

    value: Any = None


class Broken(msgspec.Struct, tag=True, frozen=True):
    """From the child instead of `Ready`."""

    problem: Problem


class Ask(msgspec.Struct, tag=True, frozen=True):
    """From the child: a call wants something of the parent."""

    number: int
    ask: int
    op: str
    arguments: dict[str, Any]


class Done(msgspec.Struct, tag=True, frozen=True):
    """From the child: the call returned."""

    number: int
    value: Any


class Failed(msgspec.Struct, tag=True, frozen=True):
    """From the child: the call raised."""

    number: int
    problem: Problem


class Pong(msgspec.Struct, tag=True, frozen=True):
    """From the child: the answer to a `Ping`."""


ToChild = Hello | Call | Cancel | Reply | Ping
FromChild = Ready | Broken | Ask | Done | Failed | Pong


def pack(message: ToChild | FromChild) -> bytes:
    """One frame.

    Raises `TypeError`, `ValueError` or `OverflowError` for a value that is no plain data; numbers of other libraries
    become floats.
    """
    return frame(message, _number)


def problem(kind: str, what: str) -> Problem:
    """A problem in one text, which can be sent whatever is in it."""
    return Problem(kind, _sendable(what)[:_LONGEST_TEXT])


def problem_of(error: MoeTrmError) -> Problem:
    """The parts of `error`, whose kind is the name of its type."""
    got, expected = (None if value is None else _sendable(str(value)) for value in (error.got, error.expected))
    further = {
        name: value for name, value in vars(error).items() if name not in _FIELDS and isinstance(value, str | int)
    }
    what, where, fix = map(_sendable, (error.what, error.where, error.fix))
    return Problem(type(error).__name__, what, where, got, expected, fix, further)


def error_of(problem: Problem, kinds: Mapping[str, type[MoeTrmError]]) -> MoeTrmError | None:
    """The error of which `problem` has the parts, as its type; None where its kind is not one of `kinds`."""
    if problem.kind not in kinds:
        return None
    error = kinds[problem.kind].__new__(kinds[problem.kind])
    MoeTrmError.__init__(
        error,
        problem.what,
        where=problem.where,
        got=problem.got,
        expected=problem.expected,
        fix=problem.fix,
    )
    vars(error).update(problem.further)
    return error


def _sendable(text: str) -> str:
    """`text`, with what UTF-8 has no bytes for (lone surrogates) written out."""
    return text.encode(errors="backslashreplace").decode()


def _number(value: object) -> float:
    if isinstance(value, Real):
        return float(value)
    raise TypeError(f"a {type(value).__name__} cannot be sent")
