"""The picture of `benchmarks.length_bias`: rejected rows by octave of length, with one threshold and by length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from benchmarks.figure import Panel, document, lines

SHOWN = ("trm_max", "trm_avg", "ln_trm", "ser", "seq_sum_k3", "geometric_mask", "seq_icepop", "opsm")


class Shares(Protocol):
    """Rejected rows of a rule in percent, by octave."""

    @property
    def rule(self) -> str: ...
    @property
    def threshold(self) -> str: ...
    @property
    def noise(self) -> str: ...
    @property
    def rates(self) -> tuple[float, ...]: ...


def draw(shares: Sequence[Shares], octaves: Sequence[str], target: float) -> str:
    """SVG of both panels: steady noise at one threshold, and noise that doubles at thresholds by length."""
    steady, by_length = (
        {row.rule: row.rates for row in shares if (row.threshold, row.noise) == kind and row.rule in SHOWN}
        for kind in (("one", "steady"), ("by_length", "doubles"))
    )
    top = max(2 * target, *(rate for rates in [*steady.values(), *by_length.values()] for rate in rates))
    return document(
        [
            *_panel(60, "One threshold for all lengths, steady noise", octaves, steady, top),
            *_panel(590, "Thresholds by length, noise that doubles", octaves, by_length, top),
        ],
        1080,
        360,
    )


def _panel(
    x0: float, title: str, octaves: Sequence[str], series: dict[str, tuple[float, ...]], top: float
) -> list[str]:
    panel = Panel(x0, x0 + 370, len(octaves) + 0.5, 0, top * 1.05)
    parts = panel.frame(title, [(top * step / 4, f"{top * step / 4:.0f}%") for step in range(5)])
    parts += [panel.below(panel.x(place), name) for place, name in enumerate(octaves, start=1)]
    parts.append(panel.below((panel.left + panel.right) / 2, "sampled tokens of the row", line=1))
    return parts + lines(panel, series)
