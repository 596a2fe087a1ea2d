"""The base of every section of the configuration, and its common types."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Decay = Annotated[float, Field(ge=0.0, lt=1.0)]


def bare_off(value: object) -> object:
    """YAML 1.1 reads a bare `off` as false; the field's documented value is the word."""
    return "off" if value is False else value


def bare_switch(value: object) -> object:
    """YAML 1.1 reads bare `on` and `off` as true and false; the field's documented values are the words."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


class Section(BaseModel):
    """A group of settings: unknown keys are refused, values are typed and immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
