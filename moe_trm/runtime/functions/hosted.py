"""A user's function as its process calls it; what an adapter makes of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from inspect import iscoroutinefunction
from typing import Any

import msgspec

from moe_trm.runtime.child_service import Asker


class FunctionSettings(msgspec.Struct, frozen=True):
    """Settings of a function's process.

    `function` and `adapter` are names for `load_function`; `key` is where `function` stands in the configuration;
    `limit_s` is the longest that a call may take.
    """

    function: str
    adapter: str
    key: str
    limit_s: float


class FunctionTraits(msgspec.Struct, frozen=True):
    """Traits of a loaded function.

    `batched`: it takes lists. `concurrent`: several calls may be open at once. `place`: its file and line.
    """

    batched: bool
    concurrent: bool
    place: str = ""


@dataclass(frozen=True)
class Hosted:
    """A loaded function as `FunctionHost` needs it.

    Attributes:
        call: `await call(payload, ask)`; its value is sent back.
        batched: the payload is a list, and so is the value.
        concurrent: several calls may be open at once, because the function awaits.
        errors: types of the exceptions that a call gets, by the `kind` of a `Refused`.
    """

    call: Callable[[Any, Asker], Awaitable[Any]]
    batched: bool = False
    concurrent: bool = True
    errors: Mapping[str, type[Exception]] = field(default_factory=dict)


def is_async(function: Callable[..., Any]) -> bool:
    """True when calling `function` returns an awaitable: an async function, or an object with an async `__call__`."""
    return iscoroutinefunction(function) or iscoroutinefunction(type(function).__call__)
