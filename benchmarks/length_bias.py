"""Reject rate by length when the policies differ by noise only, with one threshold for all and with `by_length`.

`python -m benchmarks.length_bias [--bundle FOLDER] [--json FILE] [--picture FILE]`. Token log-ratios are independent
N(0, s^2) at every length, so no length deserves to be rejected more than another. Rows have 8 to 511 tokens, as many in
every octave. A run has 40 steps: 8 are measured, then rows are judged. It is repeated with noise s that doubles over
the run, which is how a policy drifts from the engine.

With `--bundle` rows of a recorded run take the place of noise, all of them taken with negative advantage, so that
one-sided rules judge every row. Octaves with fewer than 600 rows are left out.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.length_bias_figure import draw
from benchmarks.options import command_line
from benchmarks.table import Row, report
from moe_trm import corrections
from moe_trm.corrections import Evidence
from moe_trm.corrections.by_length import NUM_OCTAVES, LengthTracker, octave_name, octave_of
from moe_trm.corrections.calibration import scores_and_lengths
from moe_trm.ratios import LogRatios
from moe_trm.recording.scores import ScoredBatch
from moe_trm.tools.whatif.recording import load

LENGTHS = (8, 16, 32, 64, 128, 256)
"""First lengths of the octaves."""
STEPS, WARM_UP, ROWS = 40, 8, 600
SLOPE_ROWS = 1000
NOISE = 0.1
REJECTED = 0.1
"""Thresholds are calibrated to reject this share of all rows."""

ENOUGH = 600
"""Rows of an octave from which a share can be read: at 10% its standard error is 1.2 points."""

RULES: dict[str, dict[str, float | str]] = {
    "trm_max": {},
    "token_veto": {},
    "seq_max_k2": {},
    "seq_max_k3": {},
    "seq_sum_k1": {},
    "seq_sum_k2": {},
    "seq_sum_k3": {},
    "seq_mis": {},
    "trm_avg": {},
    "trm_max_avg": {},
    "seq_mean_k1": {},
    "seq_mean_k2": {},
    "seq_mean_k3": {},
    "geometric_mask": {},
    "seq_icepop": {},
    "opsm": {},
    "ln_trm": {"delta": 0.02},
    "ser": {},
    "trm": {"score": "sum"},
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


@dataclass(frozen=True)
class Octaves:
    """Rejected rows of one rule in percent by octave of length, over a run."""

    rule: str
    threshold: str
    noise: str
    rates: tuple[float, ...]


def slope(name: str, fixed: Mapping[str, float | str]) -> Slope:
    """Least-squares slope of the reject rate over log2 of length. The interval assumes independent binomial counts."""
    rule = corrections.get(name)
    batches = [noise(torch.full((SLOPE_ROWS,), length), NOISE, length) for length in LENGTHS]
    bound = corrections.calibrate(rule, [corrections.scores(rule, b, **fixed) for b in batches], REJECTED, **fixed)
    rates = [1 - float(bound(batch).keep.any(dim=1).double().mean()) for batch in batches]
    doublings = [math.log2(length) for length in LENGTHS]
    center = sum(doublings) / len(doublings)
    spread = sum((x - center) ** 2 for x in doublings)
    value = sum((x - center) * rate for x, rate in zip(doublings, rates, strict=True)) / spread
    variance = sum(
        ((x - center) / spread) ** 2 * p * (1 - p) / SLOPE_ROWS for x, p in zip(doublings, rates, strict=True)
    )
    margin = 1.96 * math.sqrt(variance)
    return Slope(name, 100 * value, 100 * (value - margin), 100 * (value + margin), tuple(100 * rate for rate in rates))


def noise(lengths: Tensor, deviation: float, seed: int) -> Evidence:
    """Rows of these lengths, all with negative advantage, so that one-sided rules judge every row."""
    width = int(lengths.max())
    log_ratio = torch.randn(len(lengths), width, generator=torch.Generator().manual_seed(seed)) * deviation
    zero, mask = torch.zeros_like(log_ratio), torch.arange(width) < lengths[:, None]
    return Evidence(LogRatios(zero, log_ratio, log_ratio, mask), zero - 1)


@cache
def slopes() -> list[Slope]:
    """One of each rule."""
    return [slope(name, fixed) for name, fixed in RULES.items()]


def octaves(drifts: bool) -> list[Octaves]:
    """Every rule over one run of noise."""
    return judged("doubles" if drifts else "steady", _noise_by_step(drifts), range(3, 3 + len(LENGTHS)))


def _noise_by_step(drifts: bool) -> Iterator[Evidence]:
    first = int(math.log2(LENGTHS[0]))
    for step in range(STEPS):
        gen = torch.Generator().manual_seed(1000 + step)
        lengths = torch.exp2(first + len(LENGTHS) * torch.rand(ROWS, generator=gen)).long()
        yield noise(lengths, NOISE * 2 ** (step / STEPS if drifts else 0), step)


def recorded(folder: Path) -> Iterator[Evidence]:
    """The rows of each recorded step that have sampled tokens."""
    for updates in load(folder).steps.values():
        batches = [batch for update in updates for batch in update.batches]
        rollout, behavior, current, mask = (
            _rows(values)
            for values in zip(
                *((batch.rollout_logprobs, _behavior(batch), batch.current_logprobs, batch.mask) for batch in batches),
                strict=True,
            )
        )
        full = mask.any(dim=1)
        ratios = LogRatios(rollout[full], behavior[full], current[full], mask[full])
        yield Evidence(ratios, torch.full_like(rollout[full], -1.0))


def _behavior(batch: ScoredBatch) -> Tensor:
    """Log-probs under the weights that sampled; of the update's first scoring where these have not changed."""
    candidates = (batch.behavior_logprobs, batch.anchor_logprobs, batch.current_logprobs)
    return next(values for values in candidates if values is not None)


def _rows(parts: Sequence[Tensor]) -> Tensor:
    """Rows of different widths, with zeros behind."""
    width = max(part.shape[1] for part in parts)
    return torch.cat([F.pad(part, (0, width - part.shape[1])) for part in parts])


def judged(label: str, steps: Iterable[Evidence], octaves: Sequence[int]) -> list[Octaves]:
    """Every rule over one run: at one threshold from its first steps, and by length.

    `octaves`: log2 of the first lengths of the octaves that are shown.
    """
    single_counts = {name: torch.zeros(NUM_OCTAVES) for name in RULES}
    octave_counts = {name: torch.zeros(NUM_OCTAVES) for name in RULES}
    trackers = {name: LengthTracker(REJECTED, corrections.get(name).num_statistics) for name in RULES}
    windows: dict[str, list[Tensor]] = {name: [] for name in RULES}
    seen = torch.zeros(NUM_OCTAVES)
    for step, batch in enumerate(steps):
        lengths = batch.ratios.packing.lengths
        octave = octave_of(lengths)
        seen += octave.bincount(minlength=NUM_OCTAVES) if step >= WARM_UP else 0
        for name, fixed in RULES.items():
            rule = corrections.get(name)
            statistics, _ = scores_and_lengths(rule, batch, **fixed)
            if step >= WARM_UP:
                by_length = (statistics > trackers[name].thresholds.at(lengths)).any(dim=1)
                octave_counts[name].index_add_(0, octave, by_length.float())
                bound = corrections.calibrate(rule, windows[name], REJECTED, **fixed)
                single_counts[name].index_add_(0, octave, (~bound(batch).keep.any(dim=1)).float())
            else:
                windows[name].append(statistics)
            trackers[name].add(statistics, lengths)
    shown = list(octaves)
    return [
        Octaves(name, threshold, label, tuple((100 * counts[name] / seen)[shown].tolist()))
        for name in RULES
        for threshold, counts in (("one", single_counts), ("by_length", octave_counts))
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__file__, __doc__)
    parser.add_argument("--bundle", type=Path, metavar="FOLDER", help="judge the rows of a recorded run")
    parser.add_argument("--picture", type=Path, help="SVG of the rejected shares")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    if args.bundle is not None:
        return _of_recording(args.bundle, args.json)
    shares = [*octaves(drifts=False), *octaves(drifts=True)]
    names = [octave_name(int(math.log2(length))).replace("_", "-") for length in LENGTHS]
    rows: list[Row] = [
        {"rule": row.rule, "threshold": row.threshold, "noise": row.noise, **dict(zip(names, row.rates, strict=True))}
        for row in shares
    ]
    title = f"Rejected rows in percent by length, target {REJECTED:.0%} (iid noise, {STEPS} steps of {ROWS} rows)"
    report(title, rows, args.json)
    if args.picture is not None:
        args.picture.write_text(draw(shares, names, 100 * REJECTED), encoding="utf-8")
    return 0


def _of_recording(folder: Path, path: Path | None) -> int:
    lengths = torch.cat([batch.ratios.packing.lengths for batch in recorded(folder)])
    of_octave = octave_of(lengths).bincount(minlength=NUM_OCTAVES)
    shown = [octave for octave in range(NUM_OCTAVES) if of_octave[octave] >= ENOUGH]
    shares = judged("recorded", recorded(folder), shown)
    names = [octave_name(octave).replace("_", "-") for octave in shown]
    rows: list[Row] = [
        {"rule": row.rule, "threshold": row.threshold, **dict(zip(names, row.rates, strict=True))} for row in shares
    ]
    row_counts = ", ".join(f"{int(of_octave[octave]):,} of {name}" for octave, name in zip(shown, names, strict=True))
    report(f"Rejected rows in percent by length, target {REJECTED:.0%} (a recording: {row_counts} tokens)", rows, path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
