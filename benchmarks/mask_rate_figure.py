"""The picture of `benchmarks.mask_rate`: who is rejected by length, and TRM-Max against (1 - p)^T."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from benchmarks.figure import Panel, document, lines
from benchmarks.mask_rate_results import Prediction, Rates

SHOWN = ("trm_max", "trm_avg", "ln_trm", "ser", "seq_mean_k3", "seq_sum_k3", "geometric_mask", "opsm")
TARGET = 0.1


def draw(results: Sequence[Rates], predicted: Sequence[Prediction], lengths: Sequence[float]) -> str:
    """SVG of both panels; `lengths` is the mean length of each decile."""
    by_length = {one.rule: one.deciles for one in results if one.rule in SHOWN and one.target == TARGET}
    at = [one for one in predicted if 0.02 <= one.measured <= 0.6][:3] or list(predicted[-1:])
    measured = {f"max_kl {one.max_kl:.2g}": one.measured_deciles for one in at}
    expected = {f"max_kl {one.max_kl:.2g}": one.predicted_deciles for one in at}
    return document(
        [
            *_panel(60, "Rows rejected by length decile, thresholds for 10%", lengths, by_length),
            *_panel(590, "TRM-Max: measured, and 1 - (1 - p)^T (dashed)", lengths, measured, expected),
        ],
        1080,
        360,
    )


def _panel(
    left: float,
    title: str,
    lengths: Sequence[float],
    series: Mapping[str, Sequence[float]],
    dashed: Mapping[str, Sequence[float]] | None = None,
) -> list[str]:
    everything = [*series.values(), *(dashed or {}).values()]
    top = max([0.1, *(value for values in everything for value in values if math.isfinite(value))])
    panel = Panel(left, left + 370, len(lengths) + 0.5, 0, top * 1.05)
    parts = panel.frame(title, [(top * step / 4, f"{top * step / 4:.0%}") for step in range(5)])
    known = [(place, length) for place, length in enumerate(lengths, start=1) if math.isfinite(length)]
    parts += [panel.below(panel.x(place), f"{length:.0f}") for place, length in known]
    parts.append(panel.below((panel.left + panel.right) / 2, "mean length of the decile, sampled tokens", line=1))
    return parts + lines(panel, series, dashed)
