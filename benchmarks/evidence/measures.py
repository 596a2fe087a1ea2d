"""Named measures: each computes a figure that a page states from a result file.

A measure takes words (the name of a result file, columns, `column=value` filters) and gives a number, a number with its
95% interval, or a word. The measures here read cells of any file. `suite_measures.py` has differences between the runs
of suites, which are recomputed from the values of the runs, and `task_measures.py` what single sections need.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

REPOSITORY = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results"
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")

Interval = tuple[float, float, float]
"""A figure, and the ends of its 95% interval."""
Value = str | int | float | Interval
MEASURES: dict[str, Callable[..., Value]] = {}


def measure(function: Callable[..., Value]) -> Callable[..., Value]:
    """Register it under its name."""
    MEASURES[function.__name__] = function
    return function


@cache
def rows(file: str) -> Sequence[Mapping[str, Any]]:
    """The rows of a result file."""
    table: Sequence[Mapping[str, Any]] = json.loads((RESULTS / f"{file}.json").read_text(encoding="utf-8"))["rows"]
    return table


def matching(file: str, filters: Sequence[str]) -> list[Mapping[str, Any]]:
    """Rows whose columns have these values (`column=value`). Raises `LookupError` where there is none."""
    pairs = [condition.split("=", 1) for condition in filters]
    kept = [row for row in rows(file) if all(column in row and _same(row[column], value) for column, value in pairs)]
    if not kept:
        raise LookupError(f"{file} has no row with {' '.join(filters)}")
    return kept


def _same(value: object, text: str) -> bool:
    return str(value) == text or (
        isinstance(value, float) and NUMBER.fullmatch(text) is not None and value == float(text)
    )


@measure
def cell(file: str, column: str, *filters: str) -> Value:
    """A column of the one row with these values."""
    [row] = matching(file, filters)
    value: Value = row[column]
    return value


@measure
def interval(file: str, column: str, *filters: str) -> Value:
    """A column of the one row with these values, and its interval beside it."""
    [row] = matching(file, filters)
    ends = ("low", "high") if "low" in row and f"{column}_low" not in row else (f"{column}_low", f"{column}_high")
    return (float(row[column]), float(row[ends[0]]), float(row[ends[1]]))


@measure
def least(file: str, column: str, *filters: str) -> Value:
    """The least value of a column in the rows with these values."""
    return min(float(row[column]) for row in matching(file, filters))


@measure
def most(file: str, column: str, *filters: str) -> Value:
    """The largest."""
    return max(float(row[column]) for row in matching(file, filters))


@measure
def average(file: str, column: str, *filters: str) -> Value:
    """The mean."""
    return fmean(float(row[column]) for row in matching(file, filters))


@measure
def total(file: str, column: str, *filters: str) -> Value:
    """The sum of a column of counts."""
    return sum(int(row[column]) for row in matching(file, filters))


@measure
def count(file: str, *filters: str) -> Value:
    """Number of rows with these values."""
    return len(matching(file, filters))


@measure
def quoted(file: str, pattern: str) -> Value:
    """A figure that another page of results has: the pattern's group, or its three groups for one with an interval."""
    match = re.search(pattern, " ".join((REPOSITORY / file).read_text(encoding="utf-8").split()))
    if match is None:
        raise LookupError(f"{file} has nothing like {pattern}")
    numbers = [_number(text) for text in match.groups()]
    return numbers[0] if len(numbers) == 1 else (numbers[0], numbers[1], numbers[2])


def _number(text: str) -> float:
    return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
