"""Small line charts as SVG, in the look of the quickstart's picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from moe_trm.tools.quickstart.plot import COLOURS, INK, MUTED, Panel, circle, text

__all__ = ["COLOURS", "INK", "MUTED", "Panel", "circle", "document", "lines", "text"]

MORE_COLOURS = (*COLOURS, "#0891b2", "#65a30d", "#dc2626", "#64748b")


def document(parts: Sequence[str], width: int, height: int) -> str:
    """The parts as one SVG document on white."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="system-ui, sans-serif" '
        'font-size="12">'
    )
    return "\n".join([head, f'<rect width="{width}" height="{height}" fill="#ffffff"/>', *parts, "</svg>"]) + "\n"


def lines(panel: Panel, series: Mapping[str, Sequence[float]]) -> list[str]:
    """One line per series over x = 1, 2, ..., named to the right of the panel; NaN leaves a gap."""
    parts = []
    for place, ((name, values), colour) in enumerate(zip(series.items(), MORE_COLOURS, strict=False)):
        parts += _line(panel, values, colour)
        parts.append(text(panel.right + 10, panel.top + 12 + 17 * place, name, colour=colour))
    return parts


def _line(panel: Panel, values: Sequence[float], colour: str) -> list[str]:
    points = [(panel.x(x), panel.y(value)) for x, value in enumerate(values, start=1) if math.isfinite(value)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    line = f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>'
    return [line, *(circle(x, y, 2.5, colour) for x, y in points)]
