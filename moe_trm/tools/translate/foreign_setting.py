"""A setting of another framework as it was read: its value, or why it has none, and where it stands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class ForeignSetting:
    """One setting of the input.

    Attributes:
        key: its name there, without leading `+` or dashes.
        value: what it was set to. A flag of an argument list has a tuple of words, empty for a switch.
        place: `line 12`, `arguments`, or empty for a file of keys.
        shown: the value as it was written.
        unread: why the value cannot be read; empty when `value` is right.
    """

    key: str
    value: Any
    place: str
    shown: str
    unread: str = ""


class NeedsDecisionError(Exception):
    """A setting that somebody has to decide: its meaning here is open, or its value cannot be read."""

    def __init__(self, key: str, reason: str) -> None:
        self.key, self.reason = key, reason
        super().__init__(reason)


def merged(settings: list[ForeignSetting]) -> dict[str, ForeignSetting]:
    """Settings by key. Two different values of one key from different places are a value that cannot be read."""
    by_key: dict[str, ForeignSetting] = {}
    for setting in settings:
        earlier = by_key.get(setting.key)
        if earlier is None or (earlier.value == setting.value and not earlier.unread):
            by_key[setting.key] = setting
        elif earlier.value != setting.value or earlier.unread != setting.unread:
            reason = f"set twice, to {earlier.shown} ({earlier.place}) and to {setting.shown} ({setting.place})"
            by_key[setting.key] = ForeignSetting(setting.key, None, setting.place, setting.shown, reason)
    return by_key


@dataclass(frozen=True)
class Fate:
    """The fate of a setting that no rule has read.

    Attributes:
        kind: `unknown` is a to-do of a key that no list and no table has.
        reason: of it.
        ours: settings of ours that it would decide, and that stay open.
    """

    kind: Literal["harmless", "to do", "unknown"]
    reason: str
    ours: tuple[str, ...] = ()
