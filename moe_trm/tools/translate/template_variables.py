"""Variables of the chat template, which frameworks call its keyword arguments."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from moe_trm.config.load import yaml_value
from moe_trm.tools.translate.draft import Draft
from moe_trm.tools.translate.foreign_setting import NeedsDecisionError
from moe_trm.tools.translate.values import Rule


def template_variables(name: str, settings: Iterable[str]) -> Rule:
    """One mapping `name`, a text of it in JSON, or settings `name.VARIABLE`: whichever of `settings` there are."""
    keys = tuple(key for key in settings if key == name or key.startswith(f"{name}."))

    def apply(draft: Draft) -> None:
        variables: dict[str, Any] = {}
        for key in keys:
            value = draft.take(key)
            if key != name:
                variables[key.removeprefix(f"{name}.")] = value
            elif value:
                variables |= _mapping(key, value)
        if bad := [name for name, value in variables.items() if not isinstance(value, bool | int | float | str)]:
            raise NeedsDecisionError(keys[0], f"{', '.join(bad)}: true or false, a number or a text is expected")
        if variables:
            draft.put("task.chat_template_kwargs", variables, *keys)
        for key in keys:
            if not draft.accounted(key):
                draft.miss(key, "no variables are set")

    return Rule(keys, ("task.chat_template_kwargs",), apply)


def _mapping(key: str, value: Any) -> dict[str, Any]:
    if isinstance(value, tuple):
        value = yaml_value(value[0]) if len(value) == 1 else None
    if not isinstance(value, dict):
        raise NeedsDecisionError(key, "variables by name are expected: task.chat_template_kwargs")
    return value
