"""Conversion of a row to an example: fields for the question, the answer, and data for rewards and tools."""

from __future__ import annotations

import reprlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from moe_trm.errors import ConfigError
from moe_trm.tasks.picture_rows import Picture, PictureRows
from moe_trm.tasks.pictures import check_text_only
from moe_trm.tasks.rows import HUB, Row, read_rows

MAX_LISTED = 20
"""Bad rows that an error names."""
QUESTION_FIELDS = ("prompt", "question")
"""Fields searched for the question when `task.prompt_field` is not set."""

Message = Mapping[str, str]


@dataclass(frozen=True)
class Example:
    """One row: `name` tells source and number.

    `question` is a text, or messages of a chat; `extra` has the fields that are neither. `pictures`: in the order of
    their placeholders in the question.
    """

    name: str
    question: str | tuple[Message, ...]
    answer: str
    extra: Mapping[str, Any] = field(default_factory=dict)
    pictures: tuple[Picture, ...] = ()


@dataclass(frozen=True)
class Fields:
    """Names of the fields: `prompt`, or none: the first of `QUESTION_FIELDS` that is there.

    `answer` may be missing when `need_answer` is off. Without `pictures`, rows that have any are refused.
    """

    prompt: str | None = None
    answer: str = "answer"
    need_answer: bool = True
    pictures: PictureRows | None = None


def read_examples(
    source: str | Path,
    fields: Fields | None = None,
    finish: Callable[[Example, str], Example] = lambda candidate, _: candidate,
) -> list[Example]:
    """Every row of a source (`rows.read_rows`). `finish` makes the final example of one and its place.

    Raises `ConfigError` as `read_rows` and `finish`, and for no rows, or rows whose question is neither text nor
    messages, or that has pictures, or whose answer is missing. All bad rows are told together.
    """
    examples, bad = list[Example](), list[ConfigError]()
    folder = Path() if str(source).startswith(HUB) else Path(source).parent
    for row in read_rows(source, bad):
        try:
            examples.append(finish(_example(row, fields or Fields(), folder), row.where))
        except ConfigError as error:
            bad.append(error)
    if bad:
        raise bad[0] if len(bad) == 1 else _together(source, bad, len(bad) + len(examples))
    if not examples:
        raise ConfigError("prompt file is empty", where=str(source), got="no rows", expected="at least one row")
    return examples


def _together(source: str | Path, bad: Sequence[ConfigError], rows: int) -> ConfigError:
    """One error of several rows: how many have which fault, and the first rows with their values."""
    faults = Counter(error.what for error in bad)
    lines = [f"{number} x {what}" for what, number in faults.most_common()]
    lines += [f"{error.where.removeprefix(f'{source}, ')}: {error.got}" for error in bad[:MAX_LISTED]]
    lines += [f"... and {len(bad) - MAX_LISTED} more"] if len(bad) > MAX_LISTED else []
    return ConfigError(
        f"{len(bad)} of {rows} rows of the prompt file cannot be used",
        where=str(source),
        got="\n".join(lines),
        expected="; ".join(dict.fromkeys(str(error.expected) for error in bad)),
        fix="; ".join(dict.fromkeys(error.fix for error in bad if error.fix)) or "mend or remove these rows",
    )


def _example(row: Row, fields: Fields, folder: Path) -> Example:
    candidates = (fields.prompt,) if fields.prompt else QUESTION_FIELDS
    key = next((name for name in candidates if name in row.fields), None)
    pictures: tuple[Picture, ...] = ()
    if fields.pictures is None:
        check_text_only(row.fields, row.fields.get(key) if key else None, row.where)
    else:
        plain, pictures = fields.pictures.read(row.fields, key, folder, row.where)
        row = replace(row, fields=plain)
    question = _question(row.fields[key]) if key else None
    if question is None or key is None:
        raise ConfigError(
            "a row of the prompt file has no prompt",
            where=row.where,
            got=f"{key} is {reprlib.repr(row.fields[key])}" if key else f"fields {sorted(row.fields)}",
            expected=f"text, or messages with role and content, under {' or '.join(candidates)}",
            fix="name the field with task.prompt_field",
        )
    answer = row.fields.get(fields.answer)
    missing = answer is None or answer == ""
    if isinstance(answer, bool) or not isinstance(answer, str | int | float | None) or (missing and fields.need_answer):
        raise ConfigError(
            "a row of the prompt file has no answer",
            where=row.where,
            got=f"{fields.answer} is {reprlib.repr(answer)}" if fields.answer in row.fields else f"no {fields.answer}",
            expected=f"text or a number under {fields.answer}",
            fix="name the field with task.answer_field; only a reward of your own can do without",
        )
    extra = {name: value for name, value in row.fields.items() if name not in (key, fields.answer)}
    _check_sendable([question, answer, extra], row)
    return Example(row.name, question, "" if missing else str(answer), extra, pictures)


def _check_sendable(values: object, row: Row) -> None:
    """Refuse values that cannot be sent to the processes of user functions, before the run starts."""
    try:
        msgspec.msgpack.encode(values)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(
            "a row of the prompt file has a field that is no plain data",
            where=row.where,
            got=str(error),
            expected="text in valid Unicode, numbers, lists, objects, dates, bytes",
        ) from error


def _question(value: object) -> str | tuple[Message, ...] | None:
    if isinstance(value, str):
        return value or None
    if not isinstance(value, Sequence) or not value:
        return None
    messages = [message for message in value if isinstance(message, Mapping)]
    texts = [message.get(part) for message in messages for part in ("role", "content")]
    if len(messages) != len(value) or not all(isinstance(text, str) for text in texts):
        return None
    return tuple({"role": message["role"], "content": message["content"]} for message in messages)
