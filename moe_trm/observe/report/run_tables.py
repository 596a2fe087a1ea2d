"""Tables of a run: lost rollout servers, changed settings, and anti-patterns in its settings or metrics.

Each is empty where the run has nothing to show. `many`: the page is about several runs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from pydantic import ValidationError

from moe_trm.config.anti_patterns import AntiPattern, found
from moe_trm.config.flat import as_yaml
from moe_trm.config.schema import Config
from moe_trm.observe.report.html import section, table
from moe_trm.run_folder.run import CHANGES_FILE, SERVERS_FILE, Run

Line = TypeVar("Line")


class _ServerChange(msgspec.Struct):
    url: str
    lost: bool
    unix_s: float = msgspec.field(name="time/unix_s")
    why: str = ""
    seconds: float | None = None


class _SettingChange(msgspec.Struct):
    step: int
    key: str
    old: Any
    new: Any


def lost_servers(run: Run, *, many: bool) -> str:
    """Every loss and every return, with the time."""
    changes = _lines(run.folder / SERVERS_FILE, _ServerChange)
    if not changes:
        return ""
    rows = (
        f'<tr class="{"bad" if change.lost else "good"}"><td>{_when(change.unix_s)}</td>'
        f"<td>{escape(change.url)}</td><td>{escape(_what(change))}</td></tr>"
        for change in changes
    )
    away = sorted(url for url, lost in {change.url: change.lost for change in changes}.items() if lost)
    away_note = f'<p class="warning">Out of service at the last look: {escape(", ".join(away))}</p>' if away else ""
    return section("Rollout servers", away_note + table(("time", "server", "state"), rows), run.name if many else "")


def changed_settings(run: Run, *, many: bool) -> str:
    """Every change and the step after which it holds."""
    changes = _lines(run.folder / CHANGES_FILE, _SettingChange)
    rows = (
        f"<tr><td>{change.step}</td><th scope=row><code>{escape(change.key)}</code></th>"
        f"<td>{escape(as_yaml(change.old))}</td><td>{escape(as_yaml(change.new))}</td></tr>"
        for change in changes
    )
    shown = table(("after step", "setting", "before", "then"), rows)
    return section("Settings changed on the way", shown, run.name if many else "") if changes else ""


def anti_patterns(run: Run) -> list[AntiPattern] | None:
    """The rows of the table that `run` shows; None where its settings cannot be read by this version."""
    try:
        config = Config.model_validate_json(json.dumps(run.config), strict=True)
    except ValidationError:
        return None
    history: list[Mapping[str, float]] = [
        {name: float(value) for name, value in row.items() if isinstance(value, (int, float))} for row in run.rows
    ]
    return found(config, history)


def linted(run: Run, *, many: bool) -> str:
    """Each anti-pattern with its reason and advice."""
    patterns = anti_patterns(run)
    if not run.config or patterns == []:
        return ""
    rows = (
        f'<tr class="note"><th scope="row">{escape(pattern.name)}</th><td>{escape(pattern.reason)}</td>'
        f"<td><code>{escape(pattern.advice)}</code></td></tr>"
        for pattern in patterns or ()
    )
    unread = "<p>Not looked for: this version does not know all settings of the run.</p>"
    shown = unread if patterns is None else table(("name", "why", "try"), rows)
    return section("Anti-patterns", shown, run.name if many else "")


def _what(change: _ServerChange) -> str:
    return f"out of service: {change.why}" if change.lost else f"back after about {change.seconds or 0.0:.0f} s"


def _lines(path: Path, kind: type[Line]) -> list[Line]:
    """The lines of a file, if there is one. Damaged ones, and one that is being written, are left out."""
    found = []
    for line in path.read_bytes().splitlines() if path.is_file() else []:
        with suppress(msgspec.DecodeError):
            found.append(msgspec.json.decode(line, type=kind))
    return found


def _when(unix_s: float) -> str:
    return f"{datetime.fromtimestamp(unix_s, UTC):%Y-%m-%d %H:%M:%S} UTC"
