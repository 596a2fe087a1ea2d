"""Charts as inline SVG. Colours are classes, so that one drawing serves light and dark; sizes fit a phone.

Every curve, row and column names its run and metric (`data-run`, `data-metric`), and every drawing has its scales. So
the page's script can show exact values, and a test can map each place back to a number of `metrics.jsonl`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from moe_trm.observe.report.scale import Scale, short, step_scale, ticks, value_scale, whole_ticks

WIDTH, HEIGHT = 360.0, 190.0
LEFT, RIGHT, TOP, BOTTOM = 46.0, 352.0, 10.0, 164.0
MOST_POINTS = 600
"""Points of a curve that are drawn; of more, the extremes of each stretch."""
LETTER = 6.2
"""Width of a letter of a label at most, on average over a word."""
MOST_COLUMNS = 120
MOST_CELLS = 6000

Points = Sequence[tuple[int, float | None]]


@dataclass(frozen=True)
class Series:
    """One metric of one run: `colour` is its place in the palette; each run has its own dashes.

    `reach` is an interval around the points, as step, low and high.
    """

    run: int
    metric: str
    label: str
    colour: int
    points: Points
    reach: Sequence[tuple[int, float, float]] = ()

    @property
    def finite(self) -> list[tuple[int, float]]:
        return [(step, value) for step, value in self.points if value is not None]

    @property
    def source(self) -> str:
        return f'data-run="{self.run}" data-metric="{escape(self.metric)}"'


def lines(title: str, series: Sequence[Series], steps: tuple[int, int], *, log: bool, floor: bool) -> str:
    """Curves over steps. What a logarithmic scale cannot show (0 and less) leaves a gap."""
    x = step_scale(*steps, LEFT + 4, RIGHT - 4)
    values = [value for curve in series for _, value in curve.finite]
    values += [edge for curve in series for _, *edges in curve.reach for edge in edges]
    y = value_scale(values, BOTTOM, TOP, log=log, floor=floor)
    body = [band for curve in series for band in _band(curve, x, y)]
    body += [part for curve in series for part in _curve(curve, x, y)]
    return _drawing(title, x, y, [*_axes(x, y), *body], HEIGHT)


def heat(title: str, rows: Sequence[Series], steps: tuple[int, int], top: float | None) -> str:
    """Rows of one run, first on top; the darker, the larger, from 0 to `top`."""
    values = [value for row in rows for _, value in row.finite]
    most = top if top is not None else max(values, default=1.0) or 1.0
    height = max(96.0, min(300.0, 14.0 * len(rows)))
    step_between = math.ceil(len(rows) / 12)
    labels = [row.label.removeprefix("layer ") for row in rows]
    left_edge = max(LEFT, 12 + LETTER * max(len(label) for label in labels[::step_between]))
    x = step_scale(*steps, left_edge + 4, RIGHT - 4)
    y = Scale(0, len(rows), TOP, TOP + height)
    drawn_steps = _spread(
        sorted({step for row in rows for step, _ in row.points}), min(MOST_COLUMNS, MOST_CELLS // len(rows))
    )
    edges = _edges([x(step) for step in drawn_steps], left_edge, RIGHT)
    body = []
    for index, row in enumerate(rows):
        values_by_step = dict(row.points)
        cells = [
            f'<rect x="{begin:.2f}" y="{y(index):.2f}" width="{end - begin:.2f}" '
            f'height="{y(index + 1) - y(index):.2f}" fill-opacity="{value / most:.3f}"/>'
            for step, begin, end in zip(drawn_steps, edges, edges[1:], strict=False)
            if (value := values_by_step.get(step)) is not None
        ]
        body.append(f'<g class="cells" {row.source}>{"".join(cells)}</g>')
    for index in range(0, len(rows), step_between):
        body.append(_text(left_edge - 6, (y(index) + y(index + 1)) / 2 + 3.5, labels[index], "end"))
    frame = f'<rect class="frame" x="{left_edge:g}" y="{TOP}" width="{RIGHT - left_edge:g}" height="{height}"/>'
    return _drawing(title, x, y, [*body, frame, *_steps(x, TOP + height)], TOP + height + 26)


def stack(title: str, parts: Sequence[Series], steps: tuple[int, int]) -> str:
    """One column per step, parts from the bottom up."""
    x = step_scale(*steps, LEFT + 4, RIGHT - 4)
    values_by_part = [dict(part.points) for part in parts]
    all_steps = sorted({step for values in values_by_part for step in values})
    drawn_steps = _spread(all_steps, MOST_COLUMNS)
    tops = [math.fsum(values.get(step) or 0.0 for values in values_by_part) for step in drawn_steps]
    y = value_scale([*tops, 0.0], BOTTOM, TOP, floor=True)
    edges = _edges([x(step) for step in drawn_steps], LEFT, RIGHT)
    base = dict.fromkeys(drawn_steps, 0.0)
    body = []
    for part, values in zip(parts, values_by_part, strict=True):
        columns = []
        for step, start, right in zip(drawn_steps, edges, edges[1:], strict=False):
            value = values.get(step)
            if value:
                low, base[step] = y(base[step]), base[step] + value
                gap = min(1.0, (right - start) / 5)
                columns.append(
                    f'<rect x="{start:.1f}" y="{y(base[step]):.2f}" width="{right - start - gap:.1f}" '
                    f'height="{low - y(base[step]):.2f}"/>'
                )
        body.append(f'<g class="f{part.colour}" {part.source}>{"".join(columns)}</g>')
    return _drawing(title, x, y, [*_axes(x, y), *body], HEIGHT)


def spark(points: Points, *, log: bool = False) -> str:
    """A curve without axes, for a tile."""
    finite = [(step, value) for step, value in points if value is not None and (value > 0 or not log)]
    if len(finite) < 2:
        return ""
    x = step_scale(finite[0][0], finite[-1][0], 2, 98)
    y = value_scale((value for _, value in finite), 24, 2, log=log)
    places = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in thinned(finite, x))
    return (
        '<svg class="spark" viewBox="0 0 100 26" preserveAspectRatio="none" aria-hidden="true">'
        f'<polyline class="s0" points="{places}"/></svg>'
    )


def thinned(points: Sequence[tuple[int, float]], x: Scale) -> Sequence[tuple[int, float]]:
    """At most about `MOST_POINTS` of the points: of each stretch the first, the lowest, the highest and the last."""
    if len(points) <= MOST_POINTS:
        return points
    stretches: dict[int, list[tuple[int, float]]] = {}
    for point in points:
        place = (x(point[0]) - x.start) / (x.end - x.start)
        stretches.setdefault(int(place * MOST_POINTS / 4), []).append(point)
    kept = []
    for stretch in stretches.values():
        low, high = min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])
        kept += sorted({stretch[0], low, high, stretch[-1]})
    return kept


def _band(series: Series, x: Scale, y: Scale) -> list[str]:
    """The area of an interval; what a logarithmic scale cannot show of it ends at the border."""
    if len(series.reach) < 2:
        return []
    upper = [f"{x(step):.2f},{y(max(high, y.low)):.2f}" for step, _, high in series.reach]
    lower = [f"{x(step):.2f},{y(max(low, y.low)):.2f}" for step, low, _ in reversed(series.reach)]
    return [f'<polygon class="band f{series.colour}" points="{" ".join([*upper, *lower])}"/>']


def _curve(series: Series, x: Scale, y: Scale) -> list[str]:
    pieces: list[list[tuple[int, float]]] = [[]]
    for step, value in series.points:
        if value is None or (y.log and value <= 0):
            pieces.append([])
        else:
            pieces[-1].append((step, value))
    dashed = dashes(series.run)
    drawn = []
    for piece in pieces:
        places = [f"{x(step):.2f},{y(value):.2f}" for step, value in thinned(piece, x)]
        if len(places) > 1:
            drawn.append(f'<polyline class="s{series.colour}{dashed}" {series.source} points="{" ".join(places)}"/>')
        if 0 < len(piece) <= 12:
            drawn += [
                f'<circle class="f{series.colour}" {series.source} cx="{place.split(",")[0]}" '
                f'cy="{place.split(",")[1]}" r="2.6"/>'
                for place in places
            ]
    return drawn


def dashes(run: int) -> str:
    """The classes of the run's curves."""
    return f" dashed d{min(run, 3)}" if run else ""


def _axes(x: Scale, y: Scale) -> list[str]:
    parts = []
    for value in ticks(y):
        parts.append(f'<path class="grid" d="M{LEFT} {y(value):.1f}H{RIGHT}"/>')
        parts.append(_text(LEFT - 6, y(value) + 3.5, short(value), "end"))
    return [*parts, *_steps(x, BOTTOM)]


def _steps(x: Scale, bottom: float) -> list[str]:
    return [_text(x(step), bottom + 16, str(int(step)), "middle") for step in whole_ticks(x)]


def _drawing(title: str, x: Scale, y: Scale, body: Sequence[str], height: float) -> str:
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH:g} {height:g}" role="img" tabindex="0" aria-label="{escape(title)}" '
        f'data-x="{x.attribute}" data-y="{y.attribute}">{"".join(body)}<path class="cursor" d=""/></svg>'
    )


def _text(x: float, y: float, content: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(content)}</text>'


def _spread(steps: Sequence[int], most: int) -> Sequence[int]:
    """At most `most` of the steps, evenly spread, first and last among them."""
    if len(steps) <= most:
        return steps
    return sorted({steps[round(index * (len(steps) - 1) / (most - 1))] for index in range(most)})


def _edges(centres: Sequence[float], low: float, high: float) -> list[float]:
    """Borders of the columns around these places, within the drawing."""
    if not centres:
        return [low, high]
    between = [(first + second) / 2 for first, second in pairwise(centres)]
    reach = (between[0] - centres[0]) if between else 20.0
    return [
        max(low, centres[0] - reach),
        *between,
        min(high, centres[-1] + (centres[-1] - between[-1] if between else reach)),
    ]
