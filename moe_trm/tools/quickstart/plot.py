"""Figure of the quickstart (SVG): accuracy of the runs, and the engine mismatch with and without replayed routes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from moe_trm.observe.report.scale import Scale
from moe_trm.step.probe.pooled import Interval

WIDTH, HEIGHT = 960, 360
INK, MUTED, GRID = "#1e293b", "#64748b", "#e2e8f0"
COLOURS = ("#2563eb", "#059669", "#d97706", "#7c3aed", "#db2777")
NATIVE, REPLAYED = "#dc2626", "#2563eb"

Rows = Sequence[Mapping[str, float]]


@dataclass(frozen=True)
class Panel:
    """A plotting area with linear x and linear or logarithmic y."""

    left: float
    right: float
    x_max: float
    y_min: float
    y_max: float
    log: bool = False
    top: float = 60
    bottom: float = 300

    def x(self, value: float) -> float:
        return Scale(0, self.x_max, self.left, self.right)(value)

    def y(self, value: float) -> float:
        """Points outside are drawn at the border."""
        scale = Scale(self.y_min, self.y_max, self.bottom, self.top, self.log)
        return scale(min(max(value, self.y_min), self.y_max))

    def frame(self, title: str, ticks: Sequence[tuple[float, str]]) -> list[str]:
        """Title and horizontal grid with labels."""
        parts = [text(self.left, self.top - 24, title, size=15, weight=600)]
        for value, label in ticks:
            parts.append(f'<path d="M{self.left} {self.y(value):.1f}H{self.right}" stroke="{GRID}"/>')
            parts.append(text(self.left - 8, self.y(value) + 4, label, anchor="end", colour=MUTED))
        return parts

    def below(self, x: float, label: str, *, line: int = 0) -> str:
        """A label under the plotting area, centred at `x`."""
        return text(x, self.bottom + 20 + 18 * line, label, anchor="middle", colour=MUTED)


def draw(runs: Mapping[str, Rows], mismatch: Mapping[str, Interval]) -> str:
    """SVG document of the runs' `metrics.jsonl` rows by name, and of the pooled figures (`probe.pooled.pooled`)."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="system-ui, sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        *_learning(runs),
        *_mismatch(mismatch),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _learning(runs: Mapping[str, Rows]) -> list[str]:
    steps = max(row["step"] for rows in runs.values() for row in rows)
    panel = Panel(60, 480, steps, 0, 1)
    parts = panel.frame("Share of sampled sums that are right", [(v / 4, f"{v / 4:.2f}") for v in range(5)])
    parts += [panel.below(panel.x(step), str(step)) for step in range(0, int(steps) + 1, 10)]
    parts.append(
        panel.below((panel.left + panel.right) / 2, "training step (circles: greedy accuracy on held-out sums)", line=1)
    )
    for place, ((name, rows), colour) in enumerate(zip(runs.items(), COLOURS, strict=False)):
        line = " ".join(f"{panel.x(r['step']):.1f},{panel.y(r['reward/mean']):.1f}" for r in rows if "reward/mean" in r)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5" opacity="0.75"/>')
        parts += [
            circle(panel.x(r["step"]), panel.y(r["eval/accuracy"]), 5, colour) for r in rows if "eval/accuracy" in r
        ]
        parts.append(text(panel.right - 4, 285 - 16 * place, name, anchor="end", colour=colour))
    return parts


def _mismatch(mismatch: Mapping[str, Interval]) -> list[str]:
    panel = Panel(590, 930, 4, 1e-6, 1e-1, log=True)
    title = "Engine mismatch, k3 KL in nats, pooled"
    parts = panel.frame(title, [(10.0**exponent, f"1e{exponent}") for exponent in range(-6, 0)])
    for place, subset in enumerate(name for name in ("all", "flipped") if f"{name}/native_k3" in mismatch):
        parts.append(panel.below(panel.x(1 + 2 * place), f"{subset} tokens"))
        for shift, (name, colour) in zip((-0.3, 0.3), (("native_k3", NATIVE), ("replayed_k3", REPLAYED)), strict=True):
            parts += _whisker(panel, 1 + 2 * place + shift, mismatch[f"{subset}/{name}"], colour)
    legend = (("learner's own routes (none)", NATIVE), ("rollout's routes replayed (R3)", REPLAYED))
    for place, (label, colour) in enumerate(legend):
        parts.append(text(panel.left + 8, 78 + 16 * place, label, colour=colour))
    return [
        *parts,
        panel.below((panel.left + panel.right) / 2, "same rollouts, same weights; 95% bootstrap over prompts", line=1),
    ]


def _whisker(panel: Panel, place: float, interval: Interval, colour: str) -> list[str]:
    x = panel.x(place)
    ends = f"M{x:.1f} {panel.y(interval.low):.1f}V{panel.y(interval.high):.1f}"
    label = text(x + 9, panel.y(interval.value) + 4, f"{interval.value:.1e}", colour=colour)
    return [
        f'<path d="{ends}" stroke="{colour}" stroke-width="2"/>',
        circle(x, panel.y(interval.value), 5, colour),
        label,
    ]


def circle(x: float, y: float, radius: float, colour: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{colour}" fill-opacity="0.8"/>'


def text(
    x: float, y: float, content: str, *, anchor: str = "start", colour: str = INK, size: int = 12, weight: int = 400
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}" font-size="{size}" '
        f'font-weight="{weight}">'
        f"{escape(content)}</text>"
    )
