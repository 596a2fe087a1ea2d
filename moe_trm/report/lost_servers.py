"""The report's table of rollout servers that were lost, from `servers.jsonl`."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

import orjson

from moe_trm.report.run import Run

FILE = "servers.jsonl"


def lost_servers(run: Run, *, many: bool) -> str:
    """Every loss and every return, with the time; empty for a run that lost no server."""
    changes = _changes(run.folder / FILE)
    if not changes:
        return ""
    rows = "".join(
        f'<tr class="{"bad" if change["lost"] else "good"}"><td>{_when(change["time/unix_s"])}</td>'
        f"<td>{escape(str(change['url']))}</td><td>{escape(_what(change))}</td></tr>"
        for change in changes
    )
    away = sorted({change["url"] for change in changes if change["lost"]} - _back(changes))
    title = "Rollout servers" + (f": {run.name}" if many else "")
    now = f'<p class="warning">Out of service at the last look: {escape(", ".join(away))}</p>' if away else ""
    return (
        f'<section><h2>{escape(title)}</h2>{now}<div class="wide"><table class="rows">'
        f"<tr><th>time</th><th>server</th><th>state</th></tr>{rows}</table></div></section>"
    )


def _what(change: Mapping[str, Any]) -> str:
    if change["lost"]:
        return f"out of service: {change['why']}"
    return f"back after about {change['seconds']:.0f} s"


def _back(changes: list[Mapping[str, Any]]) -> set[str]:
    """Servers whose last change was a return."""
    return {url for url, lost in {change["url"]: change["lost"] for change in changes}.items() if not lost}


def _changes(path: Path) -> list[Mapping[str, Any]]:
    """The whole lines of the file; a last line without its end is one that is being written."""
    if not path.is_file():
        return []
    return [orjson.loads(line) for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


def _when(unix_s: float) -> str:
    return f"{datetime.fromtimestamp(unix_s, UTC):%Y-%m-%d %H:%M:%S} UTC"
