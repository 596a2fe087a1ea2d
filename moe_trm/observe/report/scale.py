"""From values to places on a drawing, and the ticks between."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Scale:
    """Linear or logarithmic map of `low..high` onto `start..end` in drawing units."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high = (math.log10(self.low), math.log10(self.high)) if self.log else (self.low, self.high)
        at = math.log10(value) if self.log else value
        return self.start + (self.end - self.start) * (at - low) / (high - low)

    @property
    def attribute(self) -> str:
        """The scale as text, from which a reader of the page can map places back to values."""
        return f"{'log' if self.log else 'linear'} {self.low!r} {self.high!r} {self.start!r} {self.end!r}"


def step_scale(first: int, last: int, start: float, end: float) -> Scale:
    """The scale of training steps; a single step stands in the middle."""
    return Scale(first - 0.5, last + 0.5, start, end) if first == last else Scale(first, last, start, end)


def value_scale(values: Iterable[float], start: float, end: float, *, log: bool = False, floor: bool = False) -> Scale:
    """The scale of finite values, with a margin; `floor` begins at 0. A logarithmic one sees only values above 0."""
    seen = [value for value in values if value > 0 or not log]
    low, high = (min(seen), max(seen)) if seen else (0.1, 1.0)
    if log:
        low, high = 10 ** (math.log10(low) - 0.08), 10 ** (math.log10(high) + 0.08)
        if high < 3 * low:
            middle = math.sqrt(low * high)
            low, high = middle / 2, middle * 2
        return Scale(low, high, start, end, log=True)
    if floor and low >= 0:
        low = 0.0
    air = 0.06 * (high - low) or abs(high) * 0.1 or 1.0
    return Scale(low if low == 0 and floor else low - air, high + air, start, end)


def ticks(scale: Scale, most: int = 5) -> Sequence[float]:
    """Round values inside the scale, about `most` of them."""
    return _log_ticks(scale, most) if scale.log else _linear_ticks(scale, most)


def whole_ticks(scale: Scale, most: int = 5) -> Sequence[float]:
    """As `ticks`, whole numbers only: steps."""
    return [tick for tick in _linear_ticks(scale, most) if tick == int(tick)]


def _linear_ticks(scale: Scale, most: int) -> Sequence[float]:
    rough = (scale.high - scale.low) / most
    unit = 10.0 ** math.floor(math.log10(rough))
    width = next(factor * unit for factor in (1, 2, 5, 10) if factor * unit >= rough)
    first, last = math.ceil(scale.low / width - 1e-9), math.floor(scale.high / width + 1e-9)
    return [round(index * width, 12) for index in range(first, last + 1)]


def _log_ticks(scale: Scale, most: int) -> Sequence[float]:
    low, high = math.log10(scale.low), math.log10(scale.high)
    decades = [10.0**exponent for exponent in range(math.ceil(low), math.floor(high) + 1)]
    if len(decades) >= 2:
        return decades[:: math.ceil(len(decades) / most)]
    finer = [f * 10.0**e for e in range(math.floor(low), math.ceil(high) + 1) for f in (1, 2, 5)]
    return [value for value in finer if scale.low <= value <= scale.high]


def short(value: float) -> str:
    """A value in about three digits, for display; the page has the exact one too."""
    if value == 0:
        return "0"
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e5:
        return str(int(value))
    size = abs(value)
    if size < 1e-3 or size >= 1e5:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    return f"{value:.3g}" if size < 100 else f"{value:.0f}"
