"""The share of tokens that a fixed band of ratios masks, against the gap between the policies, step by step.

`python -m benchmarks.evidence.masked_share [FOLDER] [--arm ARM] [--json FILE]`. `FOLDER` has the runs of the staleness
suite, whose gap grows with the age of the samples. Each run has a rank correlation, and the exponent b of masked share
= a gap^b by least squares of the logarithms, with an interval over runs.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from benchmarks.evidence.pictured import with_interval
from benchmarks.options import command_line
from benchmarks.table import Row, report
from moe_trm.errors import RunError
from moe_trm.run_folder.run import Run, read_run

FOLDER = Path("runs/staleness")
GAP, KEPT = "merged/k3_kl", "correction/kept_fraction"


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__file__, __doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=FOLDER, help=f"of the suite (default: {FOLDER})")
    parser.add_argument("--arm", default="IcePop", help="arm with no other rule than the band (default: IcePop)")
    args = parser.parse_args(argv)
    rows = list(measure([read_run(folder) for folder in finished(args.folder, args.arm)]))
    report(f"Masked share of {args.arm} against {GAP}", rows, args.json)
    return 0


def finished(folder: Path, arm: str) -> list[Path]:
    """Folders of the arm's finished runs, by seed. Raises `RunError` where there is none."""
    runs = sorted(folder.glob(f"{arm}-seed*"), key=lambda path: int(path.name.rpartition("seed")[2]))
    complete = [path for path in runs if (path / "metrics.jsonl").is_file() and read_run(path).complete]
    if not complete:
        raise RunError(
            "no run of this arm has finished here",
            where=str(folder),
            got=f"{len(runs)} folders of {arm}",
            expected="a finished run",
            fix="moe-trm experiment benchmarks/evidence/staleness.yaml",
        )
    return complete


def measure(runs: Sequence[Run]) -> Iterator[Row]:
    """One row per run, then their mean with its 95% interval."""
    points_by_run = [(run, np.array(points(run))) for run in runs]
    for run, gap_and_masked in points_by_run:
        gap, masked = gap_and_masked.T
        yield {
            "run": run.name,
            "steps": len(gap),
            "gap": f"{gap.min():.2g} to {gap.max():.2g}",
            "masked": f"{masked.min():.2g} to {masked.max():.2g}",
            "rank_correlation": rank_correlation(gap, masked),
            "exponent": exponent(gap, masked),
        }
    ranks = [rank_correlation(*gap_and_masked.T) for _, gap_and_masked in points_by_run]
    yield {
        "runs": len(points_by_run),
        "rank_correlation": statistics.fmean(ranks),
        "lowest": min(ranks),
        **with_interval("exponent", [exponent(*gap_and_masked.T) for _, gap_and_masked in points_by_run], "exponent_"),
    }


def points(run: Run) -> list[tuple[float, float]]:
    """Gap and masked share of each step where both are above 0; only these have logarithms."""
    gaps, kept = dict(run.series(GAP)), dict(run.series(KEPT))
    pairs = [(gaps[step], kept[step]) for step in sorted(gaps.keys() & kept.keys())]
    return [(gap, 1 - share) for gap, share in pairs if gap is not None and share is not None and gap > 0 and share < 1]


def rank_correlation(first: np.ndarray, second: np.ndarray) -> float:
    """Spearman's correlation, for values without ties."""
    ranks = [np.argsort(np.argsort(values)) for values in (first, second)]
    return float(np.asarray(np.corrcoef(np.stack(ranks)))[0, 1])


def exponent(gap: np.ndarray, masked: np.ndarray) -> float:
    """b of masked = a gap^b."""
    return float(np.polyfit(np.log(gap), np.log(masked), 1)[0])


if __name__ == "__main__":
    sys.exit(main())
