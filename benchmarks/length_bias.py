"""Reject rate by length when the policies differ by noise only.

`python -m benchmarks.length_bias [--json FILE]`. Token log-ratios are independent N(0, 0.1^2) at every length, so no
length deserves to be rejected more than another.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benchmarks.options import command_line
from benchmarks.table import Row, report
from moe_trm import corrections
from moe_trm.corrections import Evidence
from moe_trm.ratios import LogRatios

LENGTHS = (8, 16, 32, 64, 128, 256)
ROWS = 1000
NOISE = 0.1
REJECTED = 0.1
"""Thresholds are calibrated to reject this share of all rows."""

RULES: dict[str, dict[str, float]] = {
    "trm_max": {},
    "token_veto": {},
    "seq_max_k3": {},
    "seq_sum_k3": {},
    "trm_avg": {},
    "seq_mean_k3": {},
    "geometric_mask": {},
    "opsm": {},
    "ln_trm": {"delta": 0.02},
    "ser": {},
}


@dataclass(frozen=True)
class Slope:
    """Change of the reject rate per doubling of length, in percentage points with a 95% interval; and the rates by
    length.
    """

    rule: str
    slope: float
    low: float
    high: float
    rates: tuple[float, ...]


def slope(name: str, fixed: dict[str, float]) -> Slope:
    """Least-squares slope of the reject rate over log2 of length. The interval assumes independent binomial counts."""
    rule = corrections.get(name)
    batches = [noise(length) for length in LENGTHS]
    bound = corrections.calibrate(rule, [corrections.scores(rule, b, **fixed) for b in batches], REJECTED, **fixed)
    rates = [1 - float(bound(batch).keep.any(dim=1).double().mean()) for batch in batches]
    doublings = [math.log2(length) for length in LENGTHS]
    center = sum(doublings) / len(doublings)
    spread = sum((x - center) ** 2 for x in doublings)
    value = sum((x - center) * rate for x, rate in zip(doublings, rates, strict=True)) / spread
    variance = sum(((x - center) / spread) ** 2 * p * (1 - p) / ROWS for x, p in zip(doublings, rates, strict=True))
    margin = 1.96 * math.sqrt(variance)
    return Slope(name, 100 * value, 100 * (value - margin), 100 * (value + margin), tuple(100 * rate for rate in rates))


def noise(length: int) -> Evidence:
    """`ROWS` rows of `length` tokens, all with negative advantage, so that one-sided rules judge every row."""
    log_ratio = torch.randn(ROWS, length, generator=torch.Generator().manual_seed(length)) * NOISE
    zero = torch.zeros_like(log_ratio)
    return Evidence(LogRatios(zero, log_ratio, log_ratio, torch.ones_like(zero, dtype=torch.bool)), zero - 1)


def slopes() -> list[Slope]:
    """One of each rule."""
    return [slope(name, fixed) for name, fixed in RULES.items()]


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__file__, __doc__)
    rows: list[Row] = [
        {
            "rule": s.rule,
            "slope": s.slope,
            "low": s.low,
            "high": s.high,
            **{f"at {length}": rate for length, rate in zip(LENGTHS, s.rates, strict=True)},
        }
        for s in slopes()
    ]
    title = f"Rejected rows in percent by length, and points per doubling of length (iid noise, {ROWS} rows each)"
    report(title, rows, parser.parse_args(argv).json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
