"""Pictures, sound and video in rows of a prompt source that the model is not given: such rows are refused.

Without its picture a question would train answers about something that the model never sees. `picture_rows` reads
pictures, where `task.image_field` says that there are some.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from moe_trm.errors import ConfigError

MEDIA_FIELDS = ("image", "images", "video", "videos", "audio", "audios")
"""Fields under which data sets keep what is no text: beside the prompt, and in messages."""
_PLACEHOLDER = re.compile(r"<\|(?:image|video|audio)(?:_pad)?\|>")
"""Tokens in whose place a processor puts a picture, video or sound: those of Qwen, Llama-4 and GLM."""
_MARK = re.compile(r"<(?:image|video|audio)>")
"""Marks in prompts of verl for the next of a row's files. Text about markup has them, too."""
_SUFFIXES = "png|jpe?g|webp|gif|bmp|tiff?|mp4|webm|mov|wav|mp3|flac"
_MEDIA_FILE = re.compile(rf"data:(?:image|video|audio)/|[^\n]+\.(?:{_SUFFIXES})(?:\?\S*)?\Z", re.IGNORECASE)


def check_text_only(fields: Mapping[str, Any], prompt: object, where: str) -> None:
    """Raise `ConfigError` for a row with media.

    Args:
        fields: all of the row.
        prompt: its text, or its messages.
        where: file and line.
    """
    if medium := _in_fields(fields) or _in_messages(prompt) or _in_text(fields, prompt):
        raise ConfigError(
            "a row of the prompt file has a picture, sound or video, which the model is not given",
            where=where,
            got=medium,
            expected="text alone",
            fix=(
                "set task.image_field for pictures, if the model takes any; else remove such rows; rename a field that "
                "has one of these names and holds text"
            ),
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


def _in_text(fields: Mapping[str, Any], prompt: object) -> str | None:
    """A placeholder in the text, or a mark with a file for it in some field of the row."""
    for text in _texts(prompt):
        if placeholder := _PLACEHOLDER.search(text):
            return f"the placeholder {placeholder[0]} in the prompt"
        if mark := _MARK.search(text):
            files = (name for name, value in fields.items() if value is not prompt and _names_media(value))
            if (name := next(files, None)) is not None:
                return f"the mark {mark[0]} in the prompt, and the field {name}"
    return None


def _texts(prompt: object) -> Iterator[str]:
    """The prompt, or the texts of its messages and of their parts."""
    if isinstance(prompt, str):
        yield prompt
    elif isinstance(prompt, Mapping):
        yield from _texts(prompt.get("content", prompt.get("text")))
    elif isinstance(prompt, Sequence) and not isinstance(prompt, bytes):
        for part in prompt:
            yield from _texts(part)


def _names_media(value: object) -> bool:
    """True for a path, an address or contents of a picture, video or sound, or a list with one."""
    if isinstance(value, list | tuple):
        return any(map(_names_media, value))
    return isinstance(value, str) and bool(_MEDIA_FILE.match(value))


def _is_file(value: object) -> bool:
    """True for the form in which data sets keep files, alone or in a list: an object of `bytes` and `path`."""
    if isinstance(value, list | tuple):
        return any(map(_is_file, value))
    return isinstance(value, Mapping) and {"bytes", "path"} == set(value) and any(value.values())
