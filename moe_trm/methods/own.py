"""Methods of the user's own, named by `package.module:function` or `path/to/file.py:function`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from inspect import Parameter, signature
from typing import Any, TypeVar

from moe_trm.errors import ConfigError
from moe_trm.methods.load import load_function

Registered = TypeVar("Registered")


def is_own(name: str) -> bool:
    """Say whether `name` is a place and a function, not the name of a built-in method."""
    place, colon, function = name.rpartition(":")
    return bool(place and colon) and function.isidentifier()


def load_own(
    name: str,
    kind: type[Registered],
    built_in: Mapping[str, Any],
    *,
    what: str,
    key: str,
    decorator: str,
    source: str,
) -> Registered:
    """Import the method called `name`.

    Args:
        name: as in the configuration; a path is relative to the working directory.
        kind: the class that the decorator makes of a function.
        built_in: the table of built-in methods, whose names are taken.
        what: `correction` or `loss`, for the text of errors.
        key: the configuration key.
        decorator: how it is written above the function.
        source: the module that the decorator comes from.

    Raises:
        ConfigError: it cannot be imported, is not decorated, or bears the name of a built-in method.
    """
    function, short = load_function(name, key=key), name.rpartition(":")[2]
    word = decorator.lstrip("@").partition("(")[0]
    if not isinstance(function, kind):
        raise ConfigError(
            f"this function is no {what}",
            where=f"config key {key}",
            got=f"{name}, a plain {type(function).__name__}",
            expected=f"a function under `{decorator}`",
            fix=f"write `from {source} import {word}` in its file and `{decorator}` above `def {short}`",
        )
    if getattr(function, "name", short) in built_in:
        raise ConfigError(
            f"a built-in {what} has this name",
            where=f"config key {key}",
            got=name,
            expected=f"a name of its own: metrics are called after the function, and {short!r} means the built-in one",
            fix=f"rename the function, e.g. my_{short}",
        )
    return function


def check_declaration(
    function: Callable[..., Any], choices: Mapping[str, tuple[object, Collection[str]]], *, what: str, takes: str
) -> None:
    """Refuse a method whose decorator or signature cannot work.

    Args:
        function: under the decorator.
        choices: by argument of the decorator, what it was given and what it may be.
        what: `correction` or `loss`.
        takes: its two positional parameters in words, e.g. `evidence, log_ratio`.

    Raises:
        ConfigError: an unknown choice, or other parameters than two positional ones and keyword-only ones.
    """
    where = f"{what} {function.__name__} of {function.__module__}"
    for argument, (value, allowed) in choices.items():
        if value not in allowed:
            raise ConfigError(f"unknown {argument}", where=where, got=value, expected=", ".join(allowed))
    kinds = [parameter.kind for parameter in signature(function).parameters.values()]
    positional = [kind for kind in kinds if kind is not Parameter.KEYWORD_ONLY]
    if positional != [Parameter.POSITIONAL_OR_KEYWORD] * 2:
        raise ConfigError(
            f"a {what} takes two values, and its parameters by keyword only",
            where=where,
            got=f"{function.__name__}{signature(function)}",
            expected=f"{function.__name__}({takes}, *, ...)",
        )
