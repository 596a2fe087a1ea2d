"""Charts of the report: `charts.toml` has them as data, by section, each with the metrics it shows.

A `*` in a metric's name matches anything, and the matched part is the label. Metrics that a run did not measure are not
drawn, nor is a chart of fewer than `least` metrics.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import msgspec


class Chart(msgspec.Struct, frozen=True):
    """One chart.

    Attributes:
        metrics: pairs of name (or pattern) and label; an empty label takes what `*` matched.
        kind: `lines`, curves over steps; `heat`, a row for each metric that matches the first pattern that any does,
            and a column for each step; `stack`, parts of a whole; `totals`, a bar of the last value for each metric.
        log, floor: of the scale of `lines`: logarithmic, or from 0.
        top: the value of the darkest colour of `heat`; None: the largest.
        nothing: what `totals` says when no metric matches.
    """

    title: str
    note: str
    metrics: tuple[tuple[str, str], ...]
    kind: Literal["lines", "heat", "stack", "totals"] = "lines"
    log: bool = False
    floor: bool = False
    top: float | None = None
    nothing: str = ""
    least: int = 1


class ChartSection(msgspec.Struct, frozen=True):
    """Charts under one heading."""

    title: str
    chart: tuple[Chart, ...]


class _Page(msgspec.Struct):
    section: tuple[ChartSection, ...]


SECTIONS = msgspec.toml.decode(Path(__file__).with_suffix(".toml").read_bytes(), type=_Page).section


def shown(chart: Chart, names: Iterable[str]) -> list[tuple[str, str]]:
    """The metrics among `names` that `chart` shows, with their labels; none if it needs more."""
    names = list(names)
    if chart.kind == "heat":
        labelled = next((labelled for pattern in chart.metrics if (labelled := matching((pattern,), names))), [])
    else:
        labelled = matching(chart.metrics, names)
    return labelled if len(labelled) >= chart.least else []


def matching(metrics: tuple[tuple[str, str], ...], names: Iterable[str]) -> list[tuple[str, str]]:
    """Names among `names` that a chart shows, with their labels, in the chart's order and numbered rows by number."""
    names = sorted(names, key=_by_number)
    labels: dict[str, str] = {}
    for pattern, label in metrics:
        if "*" not in pattern:
            labels |= {pattern: label} if pattern in names and pattern not in labels else {}
            continue
        regex = re.compile("(.*)".join(re.escape(part) for part in pattern.split("*")))
        for name in names:
            match = regex.fullmatch(name)
            if match and name not in labels:
                labels[name] = label + _readable(pattern, match.groups())
    return list(labels.items())


def _readable(pattern: str, parts: Sequence[str]) -> str:
    if pattern in ("acceptance/length_*", "routing/flips/engine/position_*", "routing/flips/engine/margin_*"):
        return parts[0].replace("_up", " and more").replace("_", " to ")
    if pattern == "correction/*/rejected_length_*":
        return f"{parts[0]}, {parts[1].replace('_up', ' and more').replace('_', ' to ')}"
    if pattern.startswith("turns/"):
        return parts[0].replace("_up", " and more")
    return parts[0]


def _by_number(name: str) -> tuple[float | str, ...]:
    # Text and numbers alternate, so that like is compared with like.
    parts = re.split(r"(\d+(?:\.\d+)?)", name)
    return tuple(float(part) if place % 2 else part for place, part in enumerate(parts))
