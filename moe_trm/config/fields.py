"""The schema as a flat list of settings, for suggestions, for `config explain` and for the sources in `config show`."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from moe_trm.config.schema import Config
from moe_trm.config.schema.method_name import OneOf

REQUIRED = PydanticUndefined


@dataclass(frozen=True)
class Setting:
    """One key of the configuration.

    Attributes:
        path: dotted; the element of a list is written `*` (`correction.rules.*.name`).
        type_text: what may be written there, with its range, in words.
        default: the default, or `REQUIRED`.
        doc: the field's documentation.
        section: the model class of a section, None for a value.
        annotation: the bare type.
    """

    path: str
    type_text: str
    default: object
    doc: str
    section: type[BaseModel] | None
    annotation: object


def walk(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[Setting]:
    """Every setting, sections included, in the order of the schema."""
    for name, info in model.model_fields.items():
        setting = _setting(f"{prefix}{name}", info)
        yield setting
        inner = setting.section or _element_model(info.annotation)
        if inner is not None:
            yield from walk(inner, f"{setting.path}." if setting.section else f"{setting.path}.*.")


def lookup(path: str) -> Setting | None:
    """The setting that `path` names, list indices included; None when there is none.

    Keys of a free mapping have none.
    """
    pattern = starred(path)
    return next((setting for setting in walk() if setting.path == pattern), None)


def starred(path: str) -> str:
    """`path` with `*` for the index of every list."""
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def default_of(path: str) -> object:
    """The default at `path` (a list's element included), or `REQUIRED` when there is none."""
    value: object = Config.model_construct(model=None)
    for part in path.split("."):
        if isinstance(value, BaseModel):
            value = getattr(value, part, REQUIRED)
        elif isinstance(value, tuple) and part.isdigit() and int(part) < len(value):
            value = value[int(part)]
        elif isinstance(value, dict) and part in value:
            value = value[part]
        else:
            return REQUIRED
    return value


def _setting(path: str, info: FieldInfo) -> Setting:
    section = info.annotation if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel) else None
    text = "section" if section else _bounded(info.annotation, info.metadata)
    return Setting(path, text, info.default, (info.description or "").strip(), section, info.annotation)


def _element_model(annotation: Any) -> type[BaseModel] | None:
    for argument in get_args(annotation):
        if isinstance(argument, type) and issubclass(argument, BaseModel):
            return argument
    return None


def type_text(annotation: Any) -> str:
    """A type as a user would say it: `int > 0`, `none or float`, `one of none, R2, R3, auto`."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is typing.Literal:
        return "one of " + ", ".join(str(value) for value in arguments)
    if origin is typing.Annotated:
        return _bounded(arguments[0], arguments[1:])
    if origin in (typing.Union, types.UnionType):
        type_names = [type_text(argument) for argument in arguments if argument is not type(None)]
        return " or ".join([*type_names, "none"] if type(None) in arguments else type_names)
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            return f"list of {type_text(arguments[0])}"
        return f"list of {len(arguments)}: " + ", ".join(type_text(argument) for argument in arguments)
    if origin is dict:
        return f"mapping of {type_text(arguments[1])} by name"
    if isinstance(annotation, type):
        if issubclass(annotation, BaseModel):
            return "section with " + ", ".join(annotation.model_fields)
        return {"str": "text", "bool": "true or false", "int": "integer", "float": "number"}.get(
            annotation.__name__, annotation.__name__
        )
    return str(annotation)


def _bounded(annotation: Any, metadata: Sequence[Any]) -> str:
    """A type with its bounds; the names that a text may take stand in place of both."""
    bounds = _bounds(metadata)
    named = (str(item) for item in metadata if isinstance(item, OneOf))
    return next(named, type_text(annotation) + (f" {bounds}" if bounds else ""))


def _bounds(metadata: typing.Iterable[Any]) -> str:
    """`> 0, <= 1` of annotated_types objects, which may stand alone or inside a FieldInfo."""
    bounds: list[str] = []
    for item in metadata:
        if isinstance(item, FieldInfo):
            bounds.append(_bounds(item.metadata))
        for name, sign in (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<=")):
            if hasattr(item, name) and not isinstance(item, FieldInfo):
                bounds.append(f"{sign} {getattr(item, name):g}")
    return ", ".join(text for text in bounds if text)
