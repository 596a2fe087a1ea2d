"""Share of rows that each rule keeps, by length, at the same divergence of a token.

`python -m benchmarks.evidence.length [--rows N] [--json FILE] [--picture FILE]`. Ratios are made of numbers, no model:
the log-ratio of a token is x = log w of a token that mu sampled, so that E_mu w = 1 holds. Two shapes at the same KL:

- `spread`: every token is a little off, x normal with mean -KL and variance 2 KL;
- `flips`: one token of a hundred is far off and the others agree, as flipped experts do.

Thresholds reject 10% of rows of a mixture of all lengths, as a calibration on a real batch does. Then each length is
judged by itself. A rule that does not look at length keeps 90% of each.
"""

from __future__ import annotations

import itertools
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.figure import Panel, document, lines
from benchmarks.options import command_line
from benchmarks.table import Row, report
from moe_trm import corrections
from moe_trm.corrections import Evidence
from moe_trm.ratios import LogRatios
from moe_trm.report.intervals import around_mean

LENGTHS = (8, 16, 32, 64, 128, 256, 512)
TOKEN_KL = 1e-3
REJECTED = 0.1
FLIPPED = 0.01
"""Share of tokens that are off where flips are the cause."""
SEEDS = 4
RULES: Mapping[str, Mapping[str, float | str]] = {
    "trm_max": {},
    "trm_avg": {},
    "trm_max_avg": {},
    "ln_trm": {"delta": TOKEN_KL},
    "ser": {},
    "opsm": {},
    "geometric_mask": {},
    "seq_mis": {},
    "seq_sum_k1": {},
    "seq_mean_k1": {},
    "seq_sum_k2": {},
    "seq_max_k2": {},
    "seq_mean_k3": {},
    "seq_sum_k3": {},
    "seq_max_k3": {},
    "token_veto": {},
}
"""Rules that judge rows, with what is not calibrated."""
SHOWN = ("trm_max", "trm_avg", "trm_max_avg", "ln_trm", "ser", "geometric_mask", "seq_sum_k3", "opsm")


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__file__, __doc__)
    parser.add_argument("--rows", type=int, default=1000, help="rows of each length and seed (default: 1000)")
    parser.add_argument("--picture", type=Path, help="write the figure here, as SVG")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows = list(measure(args.rows))
    report("Kept share by length, thresholds that reject 10% of a mixture of lengths", rows, args.json)
    if args.picture:
        args.picture.write_text(draw(rows), encoding="utf-8")
    return 0


def measure(num_rows: int, seeds: int = SEEDS) -> Iterator[Row]:
    """One row per shape of the mismatch, rule and length: mean over seeds, and its 95% interval."""
    for (shape, made), (rule, fixed) in itertools.product(SHAPES.items(), RULES.items()):
        kept = [kept_by_length(rule, fixed, made, num_rows, seed) for seed in range(seeds)]
        for place, length in enumerate(LENGTHS):
            values = [of_seed[place] for of_seed in kept]
            low, high = around_mean(values) or (float("nan"), float("nan"))
            yield {"shape": shape, "rule": rule, "tokens": length, "kept": statistics.fmean(values), "low": low,
                   "high": high}  # fmt: skip


def kept_by_length(
    name: str,
    fixed: Mapping[str, float | str],
    made: Callable[[int, int, torch.Generator], Tensor],
    num_rows: int,
    seed: int,
) -> list[float]:
    """Share of rows that the rule keeps at each of `LENGTHS`, its threshold calibrated on all of them."""
    generator = torch.Generator().manual_seed(seed)
    evidences = [evidence(made(num_rows, length, generator)) for length in LENGTHS]
    rule, settings = corrections.get(name), {**fixed, "ratio": "total"}
    bound = corrections.calibrate(
        rule, [corrections.scores(rule, each, **settings) for each in evidences], REJECTED, **settings
    )
    return [float(bound(each).keep.all(1).float().mean()) for each in evidences]


def spread(number: int, length: int, generator: torch.Generator) -> Tensor:
    """Log-ratios `[number, length]`: normal, E w = 1 and KL `TOKEN_KL`."""
    noise = torch.randn(number, length, generator=generator, dtype=torch.float64)
    return noise * math.sqrt(2 * TOKEN_KL) - TOKEN_KL


def flips(number: int, length: int, generator: torch.Generator) -> Tensor:
    """Log-ratios `[number, length]`: 0 but for a share `FLIPPED`, which is normal with the KL of all."""
    kl = TOKEN_KL / FLIPPED
    noise = torch.randn(number, length, generator=generator, dtype=torch.float64) * math.sqrt(2 * kl) - kl
    off = torch.rand(number, length, generator=generator, dtype=torch.float64) < FLIPPED
    return torch.where(off, noise, 0.0)


SHAPES: Mapping[str, Callable[[int, int, torch.Generator], Tensor]] = {"spread": spread, "flips": flips}


def evidence(log_ratios: Tensor) -> Evidence:
    """Rows with these total log-ratios. Advantages are negative, so that rules on one sign judge every row."""
    zero = torch.zeros_like(log_ratios)
    ratios = LogRatios(zero, zero, log_ratios, torch.ones_like(log_ratios, dtype=torch.bool))
    return Evidence(ratios, zero - 1)


def draw(rows: Sequence[Row]) -> str:
    """SVG: the kept share by length, one panel per shape."""
    parts: list[str] = []
    for right, shape in enumerate(SHAPES):
        left = 60 + 500 * right
        panel = Panel(left, left + 300, len(LENGTHS) + 0.5, 0, 1)
        title = "every token a little off" if shape == "spread" else f"{FLIPPED:.0%} of tokens far off"
        parts += panel.frame(f"Rows kept, {title}", [(share / 4, f"{25 * share}%") for share in range(5)])
        parts += [panel.below(panel.x(place), str(length)) for place, length in enumerate(LENGTHS, start=1)]
        parts.append(panel.below((panel.left + panel.right) / 2, "tokens of an answer", line=1))
        here = [row for row in rows if row["shape"] == shape]
        parts += lines(panel, {name: [float(row["kept"]) for row in here if row["rule"] == name] for name in SHOWN})
    return document(parts, 60 + 500 * len(SHAPES), 360)


if __name__ == "__main__":
    sys.exit(main())
