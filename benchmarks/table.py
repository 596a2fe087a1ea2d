"""Rows of figures as a table on the screen and as JSON in a file."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch

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
        path.write_text(json.dumps({"title": title, **origin(), "rows": list(rows)}, indent=2) + "\n", encoding="utf-8")


def origin() -> dict[str, str | int]:
    """What figures need to be repeated: command, date (UTC), and machine."""
    return {
        "command": " ".join(["python", "-m", f"benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cores": os.cpu_count() or 0,
        "cpu": _cpu_model(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _cpu_model() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _width(name: str) -> int:
    return max(10, len(name))


def _text(value: str | int | float) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
