"""The settings that an experiment was begun with, what may still change after its first run, and what has changed."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_trm import __version__
from moe_trm.config.fields import default_of
from moe_trm.config.flat import as_yaml, different_keys
from moe_trm.errors import ConfigError, RunError

FORMAT, VERSION = "moe-trm-experiment", 1
MOST_CHANGES = 12
"""Changed settings that a refusal lists."""

Flat = dict[str, Any]


class Fixed:
    """The settings of an experiment as its folder holds them (`saved`; None: it has not begun).

    After the first run two things may change, and both are kept with their date:

    - an arm of which no run has `started`, such as a threshold that was calibrated meanwhile;
    - settings that a newer version of this package added, where every arm has them at their default.

    Raises `ConfigError` where anything else of `settings` (`Plan.settings`) has changed, or the file is of another
    format, `RunError` where it is damaged.
    """

    def __init__(self, settings: Mapping[str, Any], saved: bytes | None, started: Collection[str], where: Path) -> None:
        self._now: Flat = json.loads(json.dumps(settings))
        self.changes: list[Flat] = []
        if saved is None:
            return
        document = _read(saved, where)
        saved_settings: Flat = document["settings"]
        self.changes += document.get("changes", [])
        changed = different_keys(saved_settings, self._now)
        arms = self._now["order"]
        places = {key: place for key in changed if (place := _in_an_arm(key, arms)) is not None}
        refused = [
            key
            for key in changed
            if key not in places
            or (
                places[key][0] in started and (key in saved_settings or not _at_default(places[key][1], self._now[key]))
            )
        ]
        if refused:
            raise _refusal(saved_settings, self._now, refused, where)
        if changed:
            self.changes.append(
                {
                    "unix_s": time.time(),
                    "moe_trm": __version__,
                    "settings": [
                        {
                            "arm": arm,
                            "setting": setting,
                            "before": _value_text(saved_settings, key),
                            "after": _value_text(self._now, key),
                        }
                        for key, (arm, setting) in places.items()
                    ],
                }
            )

    def document(self) -> bytes:
        """Content of the folder's file."""
        content = {"format": FORMAT, "version": VERSION, "moe_trm": __version__, "settings": self._now}
        return json.dumps(content | {"changes": self.changes}, indent=1).encode() + b"\n"


def changed_later(changes: Sequence[Mapping[str, Any]]) -> list[tuple[float, str, str, str, str]]:
    """One row per change: time in unix seconds, arms, setting, before, after. What many arms share is one row."""
    rows: dict[tuple[float, str, str, str], list[str]] = {}
    for change in changes:
        for change_entry in change["settings"]:
            same = (change["unix_s"], change_entry["setting"], change_entry["before"], change_entry["after"])
            rows.setdefault(same, []).append(change_entry["arm"])
    return [(at, ", ".join(arms), setting, old, after) for (at, setting, old, after), arms in rows.items()]


def _read(saved: bytes, where: Path) -> Flat:
    try:
        document: Any = json.loads(saved)
        kind = document.get("format"), document.get("version")
        document["settings"]["order"]
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise RunError(
            "the settings of this experiment cannot be read",
            where=str(where),
            got=repr(error),
            expected="what `moe-trm experiment` wrote",
            fix="Give --out another folder; what ran is in the run folders beside it.",
        ) from error
    if kind != (FORMAT, VERSION):
        raise ConfigError(
            "this folder holds an experiment of another format",
            where=str(where),
            got=f"{kind[0]} {kind[1]}",
            expected=f"{FORMAT} {VERSION}",
            fix="Give --out another folder.",
        )
    return dict(document)


def _refusal(saved_settings: Flat, settings: Flat, keys: Sequence[str], where: Path) -> ConfigError:
    shown = [
        f"{key}: {_value_text(saved_settings, key)} -> {_value_text(settings, key)}" for key in keys[:MOST_CHANGES]
    ]
    more = [f"and {len(keys) - MOST_CHANGES} more"] if len(keys) > MOST_CHANGES else []
    return ConfigError(
        "the experiment in this folder was begun with other settings",
        where=str(where),
        got="\n".join([*shown, *more]),
        expected="the settings that it was begun with: those of an arm are fixed before its first run, all others "
        "before the first run of any",
        fix="Restore the file, or give --out another folder to begin anew.",
    )


def _in_an_arm(key: str, arms: Sequence[str]) -> tuple[str, str] | None:
    """Arm and setting of a dotted key, None for one of the whole experiment; names of arms may have dots themselves."""
    matching = [arm for arm in arms if key.startswith(f"arms.{arm}.")]
    return (arm := max(matching, key=len), key.removeprefix(f"arms.{arm}.")) if matching else None


def _at_default(setting: str, value: object) -> bool:
    """True for a setting that has the value it would have if it were never set."""
    return bool(json.loads(json.dumps(default_of(setting), default=str)) == value)


def _value_text(flat: Flat, key: str) -> str:
    return as_yaml(flat[key]) if key in flat else "(absent)"
