"""The page of a session: the answers of its stages, in Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.table import text_of


def page(results: Mapping[str, Mapping[str, Any]], date: str) -> str:
    """A section for each stage that was run, with its figures."""
    return "\n".join(_lines(results, date)) + "\n"


def _lines(results: Mapping[str, Mapping[str, Any]], date: str) -> Iterator[str]:
    yield f"# On this GPU, {date}"
    yield ""
    yield "| stage | what it answers | ended | seconds |"
    yield "|---|---|---|---|"
    for name, result in results.items():
        status = result["status"]
        ended = {0: "well", 124: "too late"}.get(status, f"with status {status}")
        yield f"| {name} | {result['answers']} | {ended} | {result['seconds']:.0f} |"
    for name, result in results.items():
        if result["figures"]:
            yield from ("", f"## {name}", "", "| figure | value |", "|---|---|")
            yield from (f"| {key} | {text_of(value)} |" for key, value in result["figures"].items())
