"""The content of a page: its data, its `<data>` elements, and its drawings mapped back to values."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any


@dataclass
class Drawing:
    x: tuple[str, float, float, float, float]
    y: tuple[str, float, float, float, float]
    marks: list[tuple[str, dict[str, str]]] = field(default_factory=list)

    def step(self, place: float) -> float:
        return _value(self.x, place)

    def value(self, place: float) -> float:
        return _value(self.y, place)


def _value(scale: tuple[str, float, float, float, float], place: float) -> float:
    kind, low, high, start, end = scale
    low, high = (math.log10(low), math.log10(high)) if kind == "log" else (low, high)
    value = low + (place - start) / (end - start) * (high - low)
    return 10**value if kind == "log" else value


def _scale(text: str) -> tuple[str, float, float, float, float]:
    kind, *numbers = text.split()
    low, high, start, end = map(float, numbers)
    return kind, low, high, start, end


class PageReader(HTMLParser):
    def __init__(self, html: str) -> None:
        super().__init__()
        self.values: list[float] = []
        self.drawings: list[Drawing] = []
        self.text = ""
        self._row: dict[str, str] = {}
        self.feed(html)
        script = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.S)
        assert script is not None
        self.data: Any = json.loads(script[1])

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = {name: value or "" for name, value in attrs}
        if tag == "data":
            self.values.append(float(known["value"]))
        if tag == "svg" and "data-x" in known:
            self.drawings.append(Drawing(_scale(known["data-x"]), _scale(known["data-y"])))
        if tag == "g":
            self._row = known
        if tag in ("polyline", "circle") and "data-metric" in known:
            self.drawings[-1].marks.append((tag, known))
        if tag == "rect" and "fill-opacity" in known:
            self.drawings[-1].marks.append(("cell", {**self._row, **known}))
        if tag == "rect" and "data-metric" in self._row and "fill-opacity" not in known and "class" not in known:
            self.drawings[-1].marks.append(("column", {**self._row, **known}))

    def handle_endtag(self, tag: str) -> None:
        if tag == "g":
            self._row = {}

    def handle_data(self, data: str) -> None:
        self.text += data
