"""A configuration as a flat list of dotted keys, for showing and comparing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def flatten(data: Mapping[str, Any]) -> dict[str, Any]:
    """Leaf values by dotted key; the sections of a list are numbered, lists of values stay whole."""
    flat: dict[str, Any] = {}

    def visit(value: Any, path: str) -> None:
        if isinstance(value, dict) and value:
            for key, inner in value.items():
                visit(inner, f"{path}.{key}" if path else str(key))
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            for index, inner in enumerate(value):
                visit(inner, f"{path}.{index}")
        else:
            flat[path] = value

    visit(dict(data), "")
    return flat


def different_keys(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Keys of two flat configurations whose values differ or that only one has, in their order."""
    return [key for key in dict.fromkeys([*a, *b]) if key not in a or key not in b or a[key] != b[key]]


def as_yaml(value: object) -> str:
    """A leaf as it would be written in YAML."""
    return json.dumps(list(value) if isinstance(value, tuple) else value) if not isinstance(value, str) else value
