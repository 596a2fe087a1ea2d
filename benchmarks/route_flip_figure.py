"""Figure of `benchmarks.route_flip`: flip rates by layer and by router margin, and k3 KL with and without replay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.engines.compare import Comparison, Stratum
from benchmarks.figure import INK, MUTED, Panel, document, text
from moe_trm.quickstart.figure import NATIVE, REPLAYED


def draw(compared: Comparison, a: str, b: str) -> str:
    """SVG with three panels and a line that says what was compared."""
    parts = [text(20, 16, f"A: {a}   |   B: {b}", colour=MUTED)]
    parts += _bars(70, 380, "Flip rate by layer", "decoder layer", compared.strata["layer"])
    parts += _bars(
        470,
        880,
        "Flip rate by router margin",
        "margin from here up, router probability",
        compared.strata["router margin"],
    )
    parts += _mismatch(970, 1180, compared)
    return document(parts, 1200, 360)


def _bars(left: float, right: float, title: str, axis: str, strata: Mapping[str, Stratum]) -> list[str]:
    top = min(1.0, max([1e-4, *(one.rate.high for one in strata.values())]) * 1.1)
    panel = Panel(left, right, len(strata) + 1, 0, top)
    parts = panel.frame(title, [(top * step / 4, f"{top * step / 4:.2%}") for step in range(5)])
    for place, (name, one) in enumerate(strata.items(), start=1):
        x, width = panel.x(place), 0.6 * (right - left) / (len(strata) + 1)
        height = panel.bottom - panel.y(one.rate.value)
        parts.append(
            f'<rect x="{x - width / 2:.1f}" y="{panel.y(one.rate.value):.1f}" width="{width:.1f}" '
            f'height="{height:.1f}" fill="{REPLAYED}"/>'
        )
        parts.append(f'<path d="M{x:.1f} {panel.y(one.rate.low):.1f}V{panel.y(one.rate.high):.1f}" stroke="{INK}"/>')
        parts.append(panel.below(x, name.split(" ")[0].replace("below", "0")))
    parts.append(panel.below((left + right) / 2, axis, line=1))
    return parts


def _mismatch(left: float, right: float, compared: Comparison) -> list[str]:
    figures = {name: compared.pooled.get(f"all/{name}_k3") for name in ("native", "replayed")}
    known = {name: one for name, one in figures.items() if one is not None and one.high > 0}
    if not known:
        return []
    low = min(max(one.low, one.value / 10, 1e-16) for one in known.values()) / 2
    high = max(one.high for one in known.values()) * 2
    panel = Panel(left, right, 3, low, high, log=True)
    parts = panel.frame("k3 KL, nats", [(value, f"{value:.0e}") for value in _decades(low, high)])
    for place, (name, one) in enumerate(known.items(), start=1):
        colour, x = (NATIVE if name == "native" else REPLAYED), panel.x(place)
        parts.append(
            f'<path d="M{x:.1f} {panel.y(one.low):.1f}V{panel.y(one.high):.1f}" stroke="{colour}" stroke-width="2"/>'
        )
        parts.append(f'<circle cx="{x:.1f}" cy="{panel.y(one.value):.1f}" r="5" fill="{colour}"/>')
        parts += [text(x + 8, panel.y(one.value) + 4, f"{one.value:.1e}", colour=INK), panel.below(x, name)]
    return parts


def _decades(low: float, high: float) -> Sequence[float]:
    return [10.0**exponent for exponent in range(-16, 3) if low <= 10.0**exponent <= high]
