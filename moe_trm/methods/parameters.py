"""Keyword parameters of registered functions, checked at configuration instead of at first use."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from moe_trm.errors import ConfigError

Parameter = bool | float | str | None


def declared(function: Callable[..., Any]) -> tuple[tuple[str, ...], dict[str, Parameter]]:
    """Names of the keyword-only parameters without a default, and the defaults of the others."""
    parameters = [p for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
    required = tuple(p.name for p in parameters if p.default is p.empty)
    return required, {p.name: p.default for p in parameters if p.default is not p.empty}


def resolve(
    function: Callable[..., Any], settings: Mapping[str, Parameter], *, what: str, where: str, missing_fix: str = ""
) -> dict[str, Parameter]:
    """`settings` over the defaults of `function`.

    Unknown names, missing ones, NaN and values that the parameter's annotation does not take raise `ConfigError`.
    """
    required, defaults = declared(function)
    for name, value in settings.items():
        if name not in (*required, *defaults):
            raise unknown(what, name, (*required, *defaults), where)
        _check(hint(function, name, where), name, value, what=what, where=where)
    for name in required:
        if name not in settings:
            raise ConfigError(
                f"{what} {name!r} has no default",
                where=where,
                got=dict(settings),
                expected=", ".join(required),
                fix=missing_fix,
            )
    return {**defaults, **settings}


def hint(function: Callable[..., Any], name: str, where: str) -> Any:
    """The type of a parameter; a number or a word where it is not annotated."""
    annotation = inspect.signature(function).parameters[name].annotation
    if annotation is inspect.Parameter.empty:
        return float | str | None
    holder = type("Holder", (), {"__annotations__": {name: annotation}})
    try:
        return get_type_hints(holder, globalns=getattr(inspect.unwrap(function), "__globals__", {}))[name]
    except (NameError, TypeError) as error:
        raise ConfigError(
            "the type of this parameter cannot be read",
            where=f"{where}, {name}",
            got=f"{annotation} ({error})",
            expected="float, int, bool, str, Literal[...], or one of them or None",
        ) from error


def _check(hint: Any, name: str, value: Parameter, *, what: str, where: str) -> None:
    """Refuse a value of another type. Numbers come from YAML as floats, whole ones of which are integers too."""
    place = f"{where}, {name}"
    plain_value = int(value) if isinstance(value, float) and value.is_integer() else value
    try:
        TypeAdapter(hint).validate_python(plain_value, strict=True)
    except ValidationError as error:
        if get_origin(hint) is Literal:
            options = ", ".join(map(str, get_args(hint)))
            raise ConfigError(f"unknown {name}", where=place, got=value, expected=options) from error
        expected = " or ".join(issue["msg"].removeprefix("Input should be ") for issue in error.errors())
        raise ConfigError(f"{what} is of another kind", where=place, got=value, expected=expected) from error
    if isinstance(value, float) and math.isnan(value):
        raise ConfigError(f"{what} is NaN", where=place, got=value)


def bind(
    function: Callable[..., Any],
    ratio: str,
    settings: Mapping[str, Parameter],
    known_ratios: Collection[str],
    *,
    what: str,
    where: str,
    missing_fix: str = "",
) -> tuple[str, dict[str, Parameter]]:
    """The ratio that a method reads (`ratio` unless `settings` names another one), and all its parameters.

    Raises as `resolve` does.
    """
    parameters = {name: value for name, value in settings.items() if name != "ratio"}
    ratio_name = str(settings.get("ratio", ratio))
    if ratio_name not in known_ratios:
        raise ConfigError("unknown ratio", where=where, got=ratio_name, expected=", ".join(known_ratios))
    return ratio_name, resolve(function, parameters, what=what, where=where, missing_fix=missing_fix)


def unknown(what: str, name: str, names: Collection[str], where: str) -> ConfigError:
    """The error for a name that does not exist, with the nearest one that does."""
    close = difflib.get_close_matches(name, names, n=1)
    return ConfigError(
        f"unknown {what} {name!r}",
        where=where,
        got=name,
        expected=", ".join(sorted(names)) or "none",
        fix=f"did you mean {close[0]!r}?" if close else "",
    )
