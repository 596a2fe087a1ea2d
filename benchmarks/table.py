"""Rows of figures as a table on the screen and as JSON in a file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

Row = dict[str, str | int | float]


def report(title: str, rows: Sequence[Row], path: Path | None = None) -> None:
    """Print `rows` under `title`, one table for each run of rows with the same columns, and write them to `path` if given."""
    lines = [title]
    previous: list[str] = []
    for row in rows:
        if list(row) != previous:
            previous = list(row)
            lines += ["", "  ".join(name.rjust(_width(name)) for name in previous)]
        lines.append("  ".join(_text(value).rjust(_width(name)) for name, value in row.items()))
    print("\n".join(lines))
    if path is not None:
        path.write_text(json.dumps({"title": title, "rows": list(rows)}, indent=2) + "\n", encoding="utf-8")


def _width(name: str) -> int:
    return max(10, len(name))


def _text(value: str | int | float) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
