"""The picture of `benchmarks.mask_rate`: who is rejected by length, and TRM-Max against (1 - p)^T."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from benchmarks.figure import Panel, document, lines

if TYPE_CHECKING:
    from benchmarks.mask_rate import Prediction, Rates

SHOWN = ("trm_max", "trm_avg", "ln_trm", "ser", "seq_mean_k3", "seq_sum_k3", "geometric_mask", "opsm")
TARGET = 0.1


def draw(results: Sequence[Rates], predicted: Sequence[Prediction], lengths: Sequence[float]) -> str:
    """SVG of both panels; `lengths` is the mean length of each decile."""
    by_length = {one.rule: one.deciles for one in results if one.rule in SHOWN and one.target == TARGET}
    at = [one for one in predicted if 0.02 <= one.measured <= 0.6][:3] or list(predicted[-1:])
    curves: dict[str, Sequence[float]] = {}
    for one in at:
        curves[f"measured at {one.max_kl:.2g}"] = one.measured_deciles
        curves[f"(1-p)^T at {one.max_kl:.2g}"] = one.predicted_deciles
    return document(
        [
            *_panel(60, "Rows rejected by length decile, thresholds for 10%", by_length, lengths),
            *_panel(560, "TRM-Max by length decile, measured and predicted", curves, lengths),
        ],
        1000,
        360,
    )


def _panel(left: float, title: str, series: Mapping[str, Sequence[float]], lengths: Sequence[float]) -> list[str]:
    top = max([0.1, *(value for values in series.values() for value in values if value == value)])
    panel = Panel(left, left + 410, len(lengths) + 0.5, 0, top * 1.05)
    parts = panel.frame(title, [(top * step / 4, f"{top * step / 4:.0%}") for step in range(5)])
    parts += [panel.below(panel.x(place), f"{length:.0f}") for place, length in enumerate(lengths, start=1)]
    parts.append(panel.below((panel.left + panel.right) / 2, "mean length of the decile, sampled tokens", line=1))
    return parts + lines(panel, series, dashed=[name for name in series if name.startswith("(1-p)")])
