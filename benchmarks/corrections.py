"""A preset and all diagnostics of the engine mismatch, compared with verl's own function.

`python -m benchmarks.corrections [--json FILE]` uses 256 rows of up to 8,192 tokens, half of it padding, on one CPU
thread. Both sides start from log-probs and mask. Times are CPU times, so other load on the machine matters little. verl
is not a dependency: `--verl FOLDER` names a folder into which it was installed for this comparison (`pip install
--no-deps --target FOLDER verl tensordict ray codetiming`). Without it only our part is measured.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.options import command_line
from benchmarks.table import Row, report
from moe_trm import corrections, diagnostics
from moe_trm.corrections import Correction, Evidence
from moe_trm.ratios import LogRatios

PRESET = "decoupled_geo_rs_seq_tis"
PAIRS = 15
SAME_NAMES = (
    "kl", "k3_kl", "training_ppl", "rollout_ppl", "training_log_ppl", "rollout_log_ppl", "log_ppl_diff",
    "log_ppl_abs_diff", "log_ppl_diff_max", "log_ppl_diff_min", "ppl_ratio", "chi2_token", "chi2_seq",
)  # fmt: skip


@dataclass(frozen=True)
class Batch:
    """Log-probs of both engines and the mask, `[B, T]`."""

    rollout: Tensor
    behavior: Tensor
    mask: Tensor


def make_batch(rows: int, length: int = 8192) -> Batch:
    """Rows of lengths that fill half of the rectangle, with an engine mismatch of 0.02 nats a token."""
    gen = torch.Generator().manual_seed(0)
    mask = torch.arange(length) < torch.linspace(1, length, rows).round()[:, None]
    rollout = -2 * torch.rand(rows, length, generator=gen)
    noise = 0.02 * torch.randn(rows, length, generator=gen)
    return Batch(rollout, rollout + torch.where(mask, noise, 0.0), mask)


def ours(batch: Batch) -> tuple[Correction, dict[str, float]]:
    """The preset's correction, and every metric as a plain number."""
    ratios = LogRatios(batch.rollout, batch.behavior, batch.behavior, batch.mask)
    evidence = Evidence(ratios, advantages=batch.behavior)
    rules = [corrections.get(name).bind(**thresholds) for name, thresholds in corrections.presets[PRESET].rules]
    correction = corrections.compose(rules)(evidence)
    return correction, diagnostics.finalize({**correction.metrics, **diagnostics.metrics(evidence, ("engine",))})


def load_verl(folder: Path | None) -> Callable[[Batch], Any] | None:
    """verl's function of the same preset, or None where it was not asked for."""
    if folder is None:
        return None
    sys.path.append(str(folder))
    function = import_module("verl.trainer.ppo.rollout_corr_helper").compute_rollout_correction_and_rejection_mask

    def run(batch: Batch) -> Any:
        return function(
            batch.behavior,
            batch.rollout,
            batch.mask,
            rollout_is="sequence",
            rollout_is_threshold=2.0,
            rollout_rs="seq_mean_k1",
            rollout_rs_threshold="0.999_1.001",
        )

    return run


def seconds(function: Callable[[Batch], Any], batch: Batch) -> float:
    start = time.process_time()
    function(batch)
    return time.process_time() - start


def check_equal(batch: Batch, theirs: Callable[[Batch], Any]) -> float:
    """Largest relative difference of weights and shared metrics; masks must be identical."""
    correction, metrics = ours(batch)
    weights, mask, their_metrics = theirs(batch)
    if not torch.equal(correction.keep, mask.bool()):
        raise SystemExit("the rejection masks differ")
    kept = correction.keep
    weight_gap = (correction.weights[kept] / weights.batch["rollout_is_weights"][kept] - 1).abs()
    gaps = [float(weight_gap.max()) if len(weight_gap) else 0.0]
    for name in SAME_NAMES:
        one, two = metrics[f"engine/{name}"], their_metrics[f"rollout_corr/{name}"]
        gaps.append(abs(one - two) / max(abs(two), 1e-3))
    return max(gaps)


def peak_bytes(function: Callable[[Batch], tuple[Correction, dict[str, float]]], batch: Batch) -> int:
    """Peak memory of the tensors that the call makes, minus the memory of its results."""
    with torch.profiler.profile(profile_memory=True) as profile:
        result = function(batch)
    results = sum(value.numel() * value.element_size() for value in (result[0].weights, result[0].keep))
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    held, peak = 0, 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak - results


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__file__, __doc__)
    parser.add_argument("--verl", type=Path, help="folder that holds an installed verl")
    parser.add_argument("--pairs", type=int, default=PAIRS, help="runs of each, taken in turn (default: %(default)s)")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    theirs, rows = load_verl(args.verl), list[Row]()
    for num_rows in (64, 128, 256):
        batch = make_batch(num_rows)
        ours(batch)
        pairs = [(seconds(ours, batch), seconds(theirs, batch) if theirs else math.nan) for _ in range(args.pairs)]
        tokens = int(batch.mask.sum())
        median = statistics.median(one for one, _ in pairs)
        row: Row = {
            "rows": num_rows,
            "tokens": tokens,
            "ours ms": 1e3 * median,
            "ns per token": 1e9 * median / tokens,
            "extra bytes per token": peak_bytes(ours, batch) / tokens,
        }
        if theirs:
            row |= {
                "verl ms": 1e3 * statistics.median(two for _, two in pairs),
                "times faster": statistics.median(two / one for one, two in pairs),
                "largest difference": check_equal(batch, theirs),
            }
        rows.append(row)
    report(f"{PRESET} with diagnostics, medians of {args.pairs} pairs", rows, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
