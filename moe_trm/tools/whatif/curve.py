"""The curve of a sweep: as an SVG picture, and as characters on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from moe_trm.observe.report.scale import Scale, short, ticks, value_scale
from moe_trm.tools.whatif.judge import RuleOutcome
from moe_trm.tools.whatif.sweep import Sweep

CURVES = (
    ("tokens kept", "correction/kept_fraction", "#2f6bd0"),
    ("rows kept", "correction/kept_sequence_fraction", "#178a6f"),
    ("effective sample size of the gradient", "gradient/eff_sample_size", "#c07a12"),
)
"""Label, metric and colour of each curve; all are shares."""
WIDTH, HEIGHT = 640.0, 360.0
LEFT, RIGHT, TOP, BOTTOM = 56.0, 624.0, 44.0, 308.0
BARS = 40
"""Characters of a full bar on a terminal."""


def bars(sweep: Sweep, outcomes: Sequence[RuleOutcome]) -> str:
    """The share of tokens kept at each value, as bars that fit a terminal."""
    label, metric, _ = CURVES[0]
    lines = [f"{label}, by {sweep.key}:"]
    for value, outcome in zip(sweep.values, outcomes, strict=True):
        share = (outcome.pooled or {}).get(metric)
        bar = "cannot" if share is None else f"{share:7.2%} {'█' * round(BARS * share)}"
        lines.append(f"  {short(value):>10} {bar}")
    return "\n".join(lines)


def picture(sweep: Sweep, outcomes: Sequence[RuleOutcome]) -> str:
    """The curves as a self-contained SVG; a value at which the candidate could not run leaves a gap."""
    x = value_scale(sweep.values, LEFT, RIGHT, log=sweep.logarithmic)
    y = Scale(0.0, 1.0, BOTTOM, TOP)
    parts = [*_axes(sweep, x, y)]
    for place, (label, metric, colour) in enumerate(CURVES):
        points = [
            (x(value), y(min(1.0, max(0.0, share))), value, share)
            for value, outcome in zip(sweep.values, outcomes, strict=True)
            if (share := (outcome.pooled or {}).get(metric)) is not None
        ]
        line = " ".join(f"{point_x:.1f},{top:.1f}" for point_x, top, *_ in points)
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{line}"/>')
        parts += [
            f'<circle cx="{point_x:.1f}" cy="{top:.1f}" r="3" fill="{colour}"><title>{escape(label)} at '
            f"{escape(sweep.key)}={short(value)}: {share!r}</title></circle>"
            for point_x, top, value, share in points
        ]
        at = LEFT + (0, 110, 210)[place]
        parts.append(f'<rect x="{at:g}" y="14" width="14" height="4" fill="{colour}"/>')
        parts.append(_text(at + 20, 20, label, "start"))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:g} {HEIGHT:g}" width="{WIDTH:g}" '
        f'height="{HEIGHT:g}" font-family="system-ui, sans-serif" font-size="12">'
        f'<rect width="{WIDTH:g}" height="{HEIGHT:g}" fill="#ffffff"/>{"".join(parts)}</svg>\n'
    )


def _axes(sweep: Sweep, x: Scale, y: Scale) -> list[str]:
    parts = []
    for value in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(f'<path d="M{LEFT:g} {y(value):.1f}H{RIGHT:g}" stroke="#e4e4df"/>')
        parts.append(_text(LEFT - 8, y(value) + 4, f"{value:.0%}", "end"))
    for value in ticks(x):
        parts.append(f'<path d="M{x(value):.1f} {BOTTOM:g}v5" stroke="#5f6772"/>')
        parts.append(_text(x(value), BOTTOM + 20, short(value), "middle"))
    return [*parts, _text((LEFT + RIGHT) / 2, BOTTOM + 42, sweep.key, "middle")]


def _text(x: float, y: float, content: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="#22262b">{escape(content)}</text>'
