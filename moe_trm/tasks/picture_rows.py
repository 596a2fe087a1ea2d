"""Rows with pictures: the files that they name, checked before anything starts, and their places in the prompt.

A row has its pictures in the field `task.image_field`, or in the parts of its messages. Each is a path (relative to the
prompt file), `data:image/...;base64,...`, or an object with `bytes` (base64 in JSON) or `path`. Its place in the prompt
is `<image>`, the model's own placeholder, or a part of type `image` or `image_url`.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_trm.errors import ConfigError
from moe_trm.models.hf_config import read_full_config
from moe_trm.models.picture_processor import PictureProcessor, as_png
from moe_trm.models.pictures import PictureTokens, picture_tokens
from moe_trm.tasks.pictures import check_text_only

MARK = "<image>"
_SPECIAL = re.compile(r"<\|[a-z_]+\|>")


@dataclass(frozen=True)
class Picture:
    """A picture of a row: its contents, or the file that is read again for each prompt, and its image tokens."""

    source: bytes | Path
    tokens: int

    def png(self) -> bytes:
        """The picture for both engines, as PNG. Raises `ConfigError` for a file that changed after it was checked."""
        try:
            return as_png(self.source if isinstance(self.source, bytes) else self.source.read_bytes())[0]
        except (OSError, ValueError) as error:
            raise ConfigError(
                "a picture can no longer be read", where=str(self.source), got=str(error), expected="the file as it was"
            ) from error


class PictureRows:
    """Reads the pictures of rows.

    Args:
        field: `task.image_field`.
        checkpoint: folder of a model that is given pictures.

    Raises:
        CheckpointError: another model, or no image processor.
        ConfigError: packages that are missing.
    """

    def __init__(self, field: str, checkpoint: str) -> None:
        self.field = field
        self.tokens: PictureTokens = picture_tokens(read_full_config(checkpoint), f"{checkpoint}/config.json")
        self._processor = PictureProcessor(checkpoint)

    def read(
        self, fields: Mapping[str, Any], key: str | None, folder: Path, where: str
    ) -> tuple[dict[str, Any], tuple[Picture, ...]]:
        """The row without its pictures, whose prompt is text, or messages of text, with the model's placeholders.

        Args:
            fields: of the row.
            key: the field of the prompt; None: the row has none.
            folder: of the prompt file.
            where: file and line.

        Raises:
            ConfigError: other media; a picture that is not there or cannot be decoded; another number of pictures than
                places.
        """
        plain = {name: value for name, value in fields.items() if name != self.field}
        inline: list[object] = []
        if key is not None and key in plain:
            plain[key] = self._with_placeholders(plain[key], inline)
        listed = _listed(fields.get(self.field))
        if listed and inline:
            raise _refused(
                "a row has pictures in its messages and in a field",
                where,
                f"{len(inline)} in messages, {len(listed)} in {self.field}",
                "one of the two",
            )
        places = self._places(plain.get(key) if key else None, plain, where)
        sources = listed or inline
        if places != len(sources):
            raise _refused(
                "a row has another number of pictures than places for them",
                where,
                f"{len(sources)} pictures, {places} places in the prompt",
                f"as many pictures as {MARK}",
            )
        return plain, tuple(self._picture(source, folder, where) for source in sources)

    def _with_placeholders(self, prompt: object, inline: list[object]) -> object:
        """The prompt with placeholders of the model for marks and parts; pictures in parts go to `inline`."""
        if isinstance(prompt, str):
            return prompt.replace(MARK, self.tokens.placeholder)
        if isinstance(prompt, Mapping) and "content" in prompt:
            return {**prompt, "content": self._with_placeholders(prompt["content"], inline)}
        if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
            return prompt
        if all(isinstance(part, Mapping) and "type" in part for part in prompt):
            texts = [self._part(part, inline) for part in prompt]
            return "".join(texts) if None not in texts else prompt
        return [self._with_placeholders(message, inline) for message in prompt]

    def _part(self, part: Mapping[str, Any], inline: list[object]) -> Any:
        """Text of a part; None of one that is neither text nor a picture."""
        if part["type"] == "text":
            return self._with_placeholders(part.get("text"), inline)
        if part["type"] not in ("image", "image_url"):
            return None
        source = part.get("image") or part.get("image_url")
        if source is not None:
            inline.append(source.get("url") if isinstance(source, Mapping) and "url" in source else source)
        return self.tokens.placeholder

    def _places(self, prompt: object, plain: Mapping[str, Any], where: str) -> int:
        """Placeholders in the prompt, outside of which there must be no token of theirs."""
        texts = [prompt] if isinstance(prompt, str) else []
        if isinstance(prompt, Sequence) and not isinstance(prompt, str | bytes):
            texts = [str(message.get("content")) for message in prompt if isinstance(message, Mapping)]
        placeholder = self.tokens.placeholder
        remaining = [text.replace(placeholder, "") for text in texts]
        for token in _SPECIAL.findall(placeholder):
            if any(token in text for text in remaining):
                raise _refused(
                    "a prompt has a token of pictures outside of a whole placeholder", where, token, placeholder
                )
        check_text_only(plain, " ".join(remaining) if isinstance(prompt, str) else prompt and remaining, where)
        return sum(text.count(placeholder) for text in texts)

    def _picture(self, source: object, folder: Path, where: str) -> Picture:
        try:
            kept = _contents(source, folder)
            data = kept if isinstance(kept, bytes) else kept.read_bytes()
            png, size = as_png(data)
            return Picture(png if isinstance(kept, bytes) else kept, self._processor.num_tokens(*size))
        except (OSError, ValueError) as error:
            raise _refused(
                "a picture of a row cannot be used", where, str(error), "a file that Pillow reads"
            ) from error


def _listed(value: object) -> list[object]:
    if value is None or value == "" or value == []:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _contents(source: object, folder: Path) -> bytes | Path:
    """Bytes of a picture, or the file that has them. Raises `ValueError`."""
    if isinstance(source, Mapping) and source.get("bytes"):
        source = source["bytes"]
        return source if isinstance(source, bytes) else _decoded(source)
    if isinstance(source, Mapping):
        source = source.get("path")
    if isinstance(source, bytes):
        return source
    if not isinstance(source, str) or not source:
        raise ValueError(f"{type(source).__name__} is neither a path nor contents")
    if source.startswith("data:"):
        return _decoded(source.partition(",")[2])
    if "://" in source:
        raise ValueError(f"{source[:60]}: nothing is fetched from an address")
    return folder / source


def _decoded(text: object) -> bytes:
    try:
        return base64.b64decode(str(text), validate=True)
    except binascii.Error as error:
        raise ValueError(f"no base64: {error}") from error


def _refused(what: str, where: str, got: str, expected: str) -> ConfigError:
    return ConfigError(what, where=where, got=got, expected=expected, fix="mend or remove these rows")
