"""Rows of figures as a table on the screen and as JSON in a file."""

from __future__ import annotations

import itertools
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch

Row = dict[str, str | int | float]


def report(
    title: str, rows: Sequence[Row], path: Path | None = None, details: Mapping[str, object] | None = None
) -> None:
    """Print `rows` under `title`, one table for each run of rows with the same columns.

    Rows and `details`, which are not printed, are written to `path` as JSON if given.
    """
    lines = [title]
    for columns, same in itertools.groupby(rows, key=lambda row: list(row)):
        lines += _table(columns, list(same))
    print("\n".join(lines))
    if path is not None:
        document = {"title": title, **origin(), "rows": list(rows), **(details or {})}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def origin() -> dict[str, str | int]:
    """Information needed to repeat a measurement: command, date (UTC) and machine."""
    return {
        "command": " ".join(["python", "-m", _module(), *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cores": os.cpu_count() or 0,
        "cpu": _cpu_model(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _module() -> str:
    """Name of the benchmark that runs, as `python -m` takes it."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return f"benchmarks.{Path(sys.argv[0]).stem}" if spec is None else str(spec.name)


def _cpu_model() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _table(columns: Sequence[str], rows: Sequence[Row]) -> list[str]:
    widths = [max(10, len(name), *(len(text_of(row[name])) for row in rows)) for name in columns]
    cells = [list(columns), *([text_of(row[name]) for name in columns] for row in rows)]
    return ["", *("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells)]


def text_of(value: str | int | float) -> str:
    """As figures are printed: four digits of a float."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
