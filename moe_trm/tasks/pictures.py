"""Pictures, sound and video in rows of a prompt source: no model is given them here, so such rows are refused.

Without its picture a question would train answers about something that the model never sees.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moe_trm.errors import ConfigError

MEDIA_FIELDS = ("image", "images", "video", "videos", "audio", "audios")
"""Fields under which data sets keep what is no text: beside the prompt, and in messages."""


def check_text_only(fields: Mapping[str, Any], prompt: object, where: str) -> None:
    """Raise `ConfigError` for a row with media.

    Args:
        fields: all of the row.
        prompt: its text, or its messages.
        where: file and line.
    """
    if medium := _in_fields(fields) or _in_messages(prompt):
        raise ConfigError(
            "a row of the prompt file has a picture, sound or video, which no model is given here",
            where=where,
            got=medium,
            expected="text alone",
            fix="remove such rows; rename a field that has one of these names and holds text",
        )


def _in_fields(fields: Mapping[str, Any]) -> str | None:
    filled = (name for name in MEDIA_FIELDS if fields.get(name) not in (None, "", b"", [], (), {}))
    files = (name for name, value in fields.items() if _is_file(value))
    name = next(filled, None) or next(files, None)
    return None if name is None else f"the field {name}"


def _in_messages(prompt: object) -> str | None:
    if not isinstance(prompt, Sequence) or isinstance(prompt, str | bytes):
        return None
    for number, message in enumerate(prompt, 1):
        if not isinstance(message, Mapping):
            continue
        if medium := _in_fields(message):
            return f"{medium} of message {number}"
        content = message.get("content")
        for part in content if isinstance(content, Sequence) and not isinstance(content, str | bytes) else ():
            if isinstance(part, Mapping) and part.get("type", "text") != "text":
                return f"a part of type {part['type']} in message {number}"
    return None


def _is_file(value: object) -> bool:
    """True for the form in which data sets keep files, alone or in a list: an object of `bytes` and `path`."""
    if isinstance(value, list | tuple):
        return any(map(_is_file, value))
    return isinstance(value, Mapping) and {"bytes", "path"} == set(value) and any(value.values())
