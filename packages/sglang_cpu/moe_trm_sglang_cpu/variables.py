"""SGLang's environment variables, parsed when they change.

SGLang reads some fifty of them per pass, by a field that decodes and parses the text each time.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

SEEN = "moe_trm_seen"
"""Attribute of a field with the bytes that it parsed, and their value."""


def wrap(native: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """SGLang's `EnvField.get`, which is `native`, which parses a text once."""
    # The bytes behind `os.environ`, which every change goes through.
    texts: dict[bytes, bytes] = os.environ._data  # type: ignore[attr-defined]

    def get(field: Any) -> Any:
        seen = field.__dict__.get(SEEN)
        if seen is not None and texts.get(seen[0]) == seen[1] and not field._set_to_none:
            return seen[2]
        value = native(field)
        name = os.fsencode(field.name)
        text = texts.get(name)
        lasting = text is not None or not callable(field.default)
        if lasting and isinstance(value, str | int | float | None):
            field.__dict__[SEEN] = (name, text, value)
        return value

    return get
