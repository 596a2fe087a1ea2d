"""Measurements whose rows a picture shows: the common end of their programs, intervals, and the axis of a panel."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from benchmarks.figure import Panel
from benchmarks.table import Row, report
from moe_trm.observe.report.intervals import around_mean


def run(
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    title: str,
    measure: Callable[[argparse.Namespace], Iterable[Row]],
    draw: Callable[[Sequence[Row]], str],
) -> int:
    """Read the command line, measure on one thread, report, and draw the `--picture` if any; the exit status."""
    parser.add_argument("--picture", type=Path, help="write the figure here, as SVG")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows = list(measure(args))
    report(title, rows, args.json)
    if args.picture:
        args.picture.write_text(draw(rows), encoding="utf-8")
    return 0


def with_interval(name: str, values: Sequence[float], prefix: str = "") -> Row:
    """Columns of the mean and of its 95% interval, whose ends are called `low` and `high` behind `prefix`."""
    low, high = around_mean(values) or (float("nan"), float("nan"))
    return {name: statistics.fmean(values), f"{prefix}low": low, f"{prefix}high": high}


def axis(panel: Panel, places: Sequence[object], name: str) -> list[str]:
    """The names of x = 1, 2, ... below a panel, and the name of them all."""
    parts = [panel.below(panel.x(x), str(place)) for x, place in enumerate(places, start=1)]
    return [*parts, panel.below((panel.left + panel.right) / 2, name, line=1)]
