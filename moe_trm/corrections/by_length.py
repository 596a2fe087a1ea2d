"""Thresholds that depend on the length of a row, so that every length is rejected alike.

Lengths are compared by octave: 1, 2-3, 4-7, 8-15 ... sampled tokens. Each octave has a running buffer of its latest
scores. Its knot is the quantile 1 - target of these, at the mean log2 length of its rows, and thresholds are linear in
log2 length between the knots. An offset per octave follows the rejected share of each step, so that a drift that the
buffer lags behind leaves no lasting error.

Shape letters: B rows, N rows of a step or a buffer, D statistics of a rule, O octaves.
Source: ours; the offset follows adaptive conformal inference (Gibbs and Candes, arXiv 2106.00170).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_trm.corrections.quantile import common_quantile

NUM_OCTAVES = 20
"""The last octave holds every longer row."""
ROWS_TO_JUDGE, ROWS_TO_KEEP = 10, 20
"""An octave is judged from that many rows expected above its threshold; steps are forgotten while that many remain."""
GAIN, MOST = 0.5, 10.0
"""Step of an octave's offset per relative error of its rejected share, and its largest size, in spreads."""
LEAST, HUGE = 1e-12, 1e300
"""The least threshold, and what stands for scores that are not finite: they are above any threshold that is in use."""


def octave_of(lengths: Tensor) -> Tensor:
    """Number of the octave of each row, int64: floor(log2 T), -1 for rows without sampled tokens."""
    edges = 2 ** torch.arange(NUM_OCTAVES, device=lengths.device)
    return torch.bucketize(lengths, edges, right=True) - 1


def octave_name(octave: int) -> str:
    """`8_15` and the like, as metrics are called."""
    return f"{2**octave}_{2 ** (octave + 1) - 1}" if octave < NUM_OCTAVES - 1 else f"{2**octave}_up"


@dataclass(frozen=True)
class LengthThresholds:
    """Quantiles of a rule's statistics by length.

    Attributes:
        position: `[O]` mean log2 length of the rows that an octave's knot is made of.
        value: `[O, D]` quantile at the knot; infinite where too few rows were seen.
        below, above: `[O, D]` slope per octave on either side of the knot.
    """

    position: Tensor
    value: Tensor
    below: Tensor
    above: Tensor

    def at(self, lengths: Tensor) -> Tensor:
        """`[B, D]` float64; infinite for rows that cannot be judged."""
        octave, log_length = octave_of(lengths), lengths.clamp(min=1).double().log2()
        quantile = self.line(octave.clamp(min=0), log_length).clamp(min=LEAST)
        return quantile.where((octave >= 0)[:, None] & quantile.isfinite(), math.inf)

    def line(self, octave: Tensor | int, log_length: Tensor) -> Tensor:
        """The quantile `[B, D]` at these log2 lengths by the knot of `octave`, `[B]` or one for all."""
        position, value, below, above = (
            table.to(log_length.device)[octave] for table in (self.position, self.value, self.below, self.above)
        )
        distance = (log_length - position)[:, None]
        return value + torch.where(distance < 0, below, above) * distance

    def judged(self) -> Tensor:
        """`[O]` bool, the octaves that have a threshold."""
        return self.value.isfinite().all(dim=1)


class LengthTracker:
    """The running buffer of one rule, and its thresholds for the next step.

    Args:
        target: share of rows to reject in every octave.
        num_statistics: D.

    `thresholds` are those for the next step, `num_steps` the steps so far.
    """

    def __init__(self, target: float, num_statistics: int) -> None:
        self._target, self._offset = target, torch.zeros(NUM_OCTAVES, dtype=torch.float64)
        self._rows = torch.zeros(0, num_statistics + 2, dtype=torch.float64)  # statistics, length, step
        self.num_steps = 0
        self.thresholds = self._made()

    def add(self, statistics_ND: Tensor, lengths_N: Tensor) -> None:
        """Take all rows of one step, of all ranks, which `thresholds` judged; then make the next step's thresholds."""
        statistics_ND = statistics_ND.double().nan_to_num(nan=HUGE, posinf=HUGE, neginf=-HUGE)
        octave, rejected = octave_of(lengths_N), (statistics_ND > self.thresholds.at(lengths_N)).any(dim=1)
        for number in self.thresholds.judged().nonzero()[:, 0].tolist():
            here = octave == number
            num_rows = int(here.sum())
            if num_rows:
                error = float(rejected[here].double().mean()) / self._target - 1
                weight = min(1.0, num_rows * self._target / ROWS_TO_KEEP)
                at_least = bool((self.thresholds.value[number] <= LEAST).all())
                # A broken batch must not lift the threshold at once: an error counts at most as the target itself.
                self._offset[number] += GAIN * weight * min(max(error, 0.0) if at_least else error, 1.0)
        self._offset.clamp_(-MOST, MOST)
        stamp = torch.full((len(lengths_N), 1), float(self.num_steps), dtype=torch.float64)
        new = torch.cat([statistics_ND, lengths_N[:, None].double(), stamp], dim=1)
        self._rows, self.num_steps = self._recent(torch.cat([self._rows, new[octave >= 0]])), self.num_steps + 1
        self.thresholds = self._made()

    def state(self) -> dict[str, Any]:
        """As plain data; numbers are float64 bytes."""
        return {
            "rows": self._rows.numpy().tobytes(),
            "offset": self._offset.numpy().tobytes(),
            "num_steps": self.num_steps,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on after `state`."""
        rows = torch.frombuffer(bytearray(state["rows"]), dtype=torch.float64) if state["rows"] else torch.zeros(0)
        self._rows = rows.double().reshape(-1, self._rows.shape[1])
        self._offset = torch.frombuffer(bytearray(state["offset"]), dtype=torch.float64)
        self.num_steps = state["num_steps"]
        self.thresholds = self._made()

    def _recent(self, rows: Tensor) -> Tensor:
        """The rows without the oldest steps of each octave that has enough newer ones."""
        octave, age = octave_of(rows[:, -2].long()), self.num_steps - rows[:, -1].long()
        keep = torch.ones(len(rows), dtype=torch.bool)
        for number in _present(octave):
            here = octave == number
            counts = age[here].bincount()
            newer = counts.cumsum(0) - counts
            keep &= ~here | (age <= (newer < ROWS_TO_KEEP / self._target).nonzero().max())
        return rows[keep]

    def _made(self) -> LengthThresholds:
        # The first knots ignore that scores change within an octave; they say how.
        return self._knots(self._knots(None))

    def _knots(self, shape: LengthThresholds | None) -> LengthThresholds:
        """Knots at the quantile of what the scores are above the line `shape`, so that the line has the target above
        it.
        """
        num_statistics = self._rows.shape[1] - 2
        position = torch.zeros(NUM_OCTAVES, dtype=torch.float64)
        value = torch.full((NUM_OCTAVES, num_statistics), math.inf, dtype=torch.float64)
        octave, wider = octave_of(self._rows[:, -2].long()), min(3 * self._target, (1 + self._target) / 2)
        for number in _present(octave):
            rows = self._rows[octave == number]
            if len(rows) * self._target < ROWS_TO_JUDGE:
                continue
            log_length = rows[:, -2].log2()
            position[number] = log_length.mean()
            line = torch.zeros(len(rows), num_statistics, dtype=torch.float64)
            if shape is not None:
                line = shape.line(number, log_length) - shape.value[number]
            quantile, lower = (common_quantile(rows[:, :-2] - line, rate) for rate in (self._target, wider))
            value[number] = quantile + self._offset[number] * (quantile - lower)
        return LengthThresholds(position, value, *_slopes(position, value))


def _present(octave: Tensor) -> list[int]:
    """Octaves that have rows."""
    return [number for number, count in enumerate(octave.bincount().tolist()) if count]


def _slopes(position: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Slopes below and above each knot: towards its neighbour, else as on its other side, else 0."""
    rise = (value[1:] - value[:-1]) / (position[1:] - position[:-1])[:, None]
    unknown = torch.full_like(value[:1], math.nan)
    is_finite = value.abs() < HUGE / 1e100
    rise = rise.where(is_finite[1:] & is_finite[:-1], math.nan)
    below, above = torch.cat([unknown, rise]), torch.cat([rise, unknown])
    below, above = below.where(below.isfinite(), above), above.where(above.isfinite(), below)
    return below.nan_to_num(nan=0.0), above.nan_to_num(nan=0.0)
