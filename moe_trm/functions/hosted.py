"""A user's function as its process calls it; what an adapter makes of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from inspect import iscoroutinefunction
from typing import Any

Asker = Callable[[str, dict[str, Any]], Awaitable[Any]]
"""`await ask(op, arguments)` asks the run for something. Raises what `Hosted.errors` names."""


@dataclass(frozen=True)
class Hosted:
    """A loaded function as `FunctionHost` needs it.

    Attributes:
        call: `await call(payload, ask)`; its value is sent back.
        batched: the payload is a list, and so is the value.
        concurrent: several calls may be open at once, because the function awaits.
        errors: exception types by the `error` of a `Reply`.
    """

    call: Callable[[Any, Asker], Awaitable[Any]]
    batched: bool = False
    concurrent: bool = True
    errors: Mapping[str, type[Exception]] = field(default_factory=dict)


def is_async(function: Callable[..., Any]) -> bool:
    """True when calling `function` returns an awaitable: an async function, or an object with an async `__call__`."""
    return iscoroutinefunction(function) or iscoroutinefunction(type(function).__call__)
