"""Values of one type from a flag of an argument list, whose value is a tuple of words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from moe_trm.tools.translate.draft import Draft
from moe_trm.tools.translate.foreign_setting import NeedsDecisionError
from moe_trm.tools.translate.values import Rule


def words(draft: Draft, key: str) -> tuple[str, ...] | None:
    """All words of the flag. None where it is not given."""
    value: tuple[str, ...] | None = draft.take(key)
    return value


def word(draft: Draft, key: str) -> str | None:
    """Its only word."""
    values = words(draft, key)
    if values is not None and len(values) != 1:
        raise NeedsDecisionError(key, f"one value is expected, not {len(values)}")
    return None if values is None else values[0]


def number(draft: Draft, key: str) -> float | None:
    """Its only word as a number."""
    value: float | None = _converted(draft, key, float, "a number")
    return value


def integer(draft: Draft, key: str) -> int | None:
    """Its only word as a whole number."""
    value: int | None = _converted(draft, key, int, "a whole number")
    return value


def on(draft: Draft, key: str) -> bool:
    """True where the switch is given."""
    values = words(draft, key)
    if values:
        raise NeedsDecisionError(key, f"a switch takes no value, and this has {' '.join(values)}")
    return values is not None


def flag(draft: Draft, key: str) -> bool | None:
    """True where the switch is given, None elsewhere: our default is the same."""
    return on(draft, key) or None


def wordly(key: str, ours: str, read: Callable[[Draft, str], Any]) -> Rule:
    """A flag that is one of our settings under another name."""

    def apply(draft: Draft) -> None:
        value = read(draft, key)
        if value is not None:
            draft.put(ours, value, key)

    return Rule((key,), (ours,), apply)


def only(key: str, allowed: Sequence[str], reason: str) -> Rule:
    """A flag of which only some values are possible here."""

    def apply(draft: Draft) -> None:
        if word(draft, key) in (None, *allowed):
            draft.same(key)
        else:
            raise NeedsDecisionError(key, reason)

    return Rule((key,), (), apply)


def _converted(draft: Draft, key: str, convert: Callable[[str], Any], what: str) -> Any:
    value_text = word(draft, key)
    try:
        return None if value_text is None else convert(value_text)
    except ValueError as error:
        raise NeedsDecisionError(key, f"{what} is expected, not {value_text}") from error
