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
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from benchmarks.evidence.pictured import axis, run, with_interval
from benchmarks.figure import Panel, document, lines
from benchmarks.options import command_line
from benchmarks.table import Row
from moe_trm import corrections
from moe_trm.corrections import Evidence
from moe_trm.ratios import LogRatios

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
    title = "Kept share by length, thresholds that reject 10% of a mixture of lengths"
    return run(parser, argv, title, lambda args: measure(args.rows), draw)


def measure(num_rows: int, seeds: int = SEEDS) -> Iterator[Row]:
    """One row per shape of the mismatch, rule and length: mean over seeds, and its 95% interval."""
    for (shape, made), (rule, fixed) in itertools.product(SHAPES.items(), RULES.items()):
        kept = [kept_by_length(rule, fixed, made, num_rows, seed) for seed in range(seeds)]
        for place, length in enumerate(LENGTHS):
            kept_share = with_interval("kept", [of_seed[place] for of_seed in kept])
            yield {"shape": shape, "rule": rule, "tokens": length, **kept_share}


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
        rule, [corrections.scores(rule, batch, **settings) for batch in evidences], REJECTED, **settings
    )
    return [float(bound(batch).keep.all(1).float().mean()) for batch in evidences]


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
        x0 = 60 + 500 * right
        panel = Panel(x0, x0 + 300, len(LENGTHS) + 0.5, 0, 1)
        title = "every token a little off" if shape == "spread" else f"{FLIPPED:.0%} of tokens far off"
        parts += panel.frame(f"Rows kept, {title}", [(share / 4, f"{25 * share}%") for share in range(5)])
        parts += axis(panel, LENGTHS, "tokens of an answer")
        points = [row for row in rows if row["shape"] == shape]
        parts += lines(panel, {name: [float(row["kept"]) for row in points if row["rule"] == name] for name in SHOWN})
    return document(parts, 60 + 500 * len(SHAPES), 360)


if __name__ == "__main__":
    sys.exit(main())
