"""Keyword parameters of registered functions, checked at configuration instead of at first use."""

from __future__ import annotations

import difflib
import inspect
import math
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from moe_trm.errors import ConfigError

Parameter = bool | float | str | None


def declared(function: Callable[..., Any]) -> tuple[tuple[str, ...], dict[str, Parameter]]:
    """Names of the keyword-only parameters without a default, and the defaults of the others."""
    parameters = [p for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
    required = tuple(p.name for p in parameters if p.default is p.empty)
    return required, {p.name: p.default for p in parameters if p.default is not p.empty}


def resolve(
    function: Callable[..., Any], given: Mapping[str, Parameter], *, what: str, where: str, missing_fix: str = ""
) -> dict[str, Parameter]:
    """`given` over the defaults of `function`.

    Unknown names, missing ones, NaN, words for numbers, and other than true and false for switches raise `ConfigError`.
    """
    required, defaults = declared(function)
    for name, value in given.items():
        if name not in (*required, *defaults):
            raise unknown(what, name, (*required, *defaults), where)
        switch = inspect.signature(function).parameters[name].annotation in (bool, "bool")
        if isinstance(value, bool) != switch:
            expected = "true or false" if switch else "a number or a word"
            raise ConfigError(f"{what} is of another kind", where=f"{where}, {name}", got=value, expected=expected)
        if isinstance(value, str) and _is_number(function, name):
            raise ConfigError(f"{what} is not a number", where=f"{where}, {name}", got=value, expected="a number")
        if isinstance(value, float) and math.isnan(value):
            raise ConfigError(f"{what} is NaN", where=f"{where}, {name}", got=value)
    for name in required:
        if name not in given:
            raise ConfigError(
                f"{what} {name!r} has no default",
                where=where,
                got=dict(given),
                expected=", ".join(required),
                fix=missing_fix,
            )
    return {**defaults, **given}


def _is_number(function: Callable[..., Any], name: str) -> bool:
    """True when the parameter is annotated, with no word among what it may be."""
    annotation = inspect.signature(function).parameters[name].annotation
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    return (
        annotation is not inspect.Parameter.empty
        and bool({"float", "int"} & set(re.findall(r"\w+", text)))
        and ("str" not in text)
    )


def bind(
    function: Callable[..., Any],
    ratio: str,
    given: Mapping[str, Parameter],
    known_ratios: Collection[str],
    *,
    what: str,
    where: str,
    missing_fix: str = "",
) -> tuple[str, dict[str, Parameter]]:
    """The ratio that a method reads (`ratio` unless `given` names another one), and all its parameters.

    Raises as `resolve` does.
    """
    own = {name: value for name, value in given.items() if name != "ratio"}
    chosen = str(given.get("ratio", ratio))
    if chosen not in known_ratios:
        raise ConfigError("unknown ratio", where=where, got=chosen, expected=", ".join(known_ratios))
    return chosen, resolve(function, own, what=what, where=where, missing_fix=missing_fix)


def unknown(what: str, name: str, known: Collection[str], where: str) -> ConfigError:
    """The error for a name that does not exist, with the nearest one that does."""
    close = difflib.get_close_matches(name, known, n=1)
    return ConfigError(
        f"unknown {what} {name!r}",
        where=where,
        got=name,
        expected=", ".join(sorted(known)) or "none",
        fix=f"did you mean {close[0]!r}?" if close else "",
    )
