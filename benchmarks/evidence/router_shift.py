"""Does the router shift before ratios spike? Rank correlations within and between neighbouring steps of real runs.

`python -m benchmarks.evidence.router_shift [FOLDER] [--json FILE]`. `FOLDER` has the runs of the staleness suite; those
with replay measure how often the live router would have chosen other experts than the record. From step 10 on, when
samples have their full age, each run has four correlations: of shift and total k3 in the same step (`same`), of shift
and the next step's k3 (`shift_first`), of k3 and the next step's shift (`k3_first`), and of k3 with the next step's k3
(`k3_itself`). Intervals are over runs.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.evidence.masked_share import FOLDER, finished, rank_correlation
from benchmarks.evidence.pictured import with_interval
from benchmarks.options import command_line
from benchmarks.table import Row, report
from moe_trm.run_folder.run import Run, read_run

ARMS = ("R3", "R3_TIS", "eta4_R3_TIS", "eta2_R3_TIS", "sync_R3")
SHIFT, K3 = "routing/local_flip_rate", "total/k3_kl"
FROM_STEP = 10
NAMES = ("same", "shift_first", "k3_first", "k3_itself")


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__file__, __doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=FOLDER, help=f"of the suite (default: {FOLDER})")
    args = parser.parse_args(argv)
    runs = {arm: [read_run(folder) for folder in finished(args.folder, arm)] for arm in ARMS}
    report("Rank correlations of router shift and total k3", list(measure(runs)), args.json)
    return 0


def measure(runs: Mapping[str, Sequence[Run]]) -> Iterator[Row]:
    """One row per arm with its means, then all runs with their 95% intervals."""
    correlations_by_arm = {arm: [correlations(run) for run in arm_runs] for arm, arm_runs in runs.items()}
    for arm, rows in correlations_by_arm.items():
        yield {"arm": arm, "runs": len(rows), **{name: statistics.fmean(row[name] for row in rows) for name in NAMES}}
    all_rows = [row for rows in correlations_by_arm.values() for row in rows]
    for name in NAMES:
        yield {"correlation": name, "runs": len(all_rows), **with_interval("mean", [row[name] for row in all_rows])}
    ahead = [row["shift_first"] - row["k3_itself"] for row in all_rows]
    yield {"correlation": "shift_first - k3_itself", "runs": len(all_rows), **with_interval("mean", ahead)}


def correlations(run: Run) -> dict[str, float]:
    """By name, over the steps that have both."""
    series = [dict(run.series(metric)) for metric in (SHIFT, K3)]
    steps = [step for step in sorted(series[0].keys() & series[1].keys()) if step >= FROM_STEP]
    shift, k3 = (np.array([values[step] for step in steps], dtype=float) for values in series)
    return {
        "same": rank_correlation(shift, k3),
        "shift_first": rank_correlation(shift[:-1], k3[1:]),
        "k3_first": rank_correlation(k3[:-1], shift[1:]),
        "k3_itself": rank_correlation(k3[:-1], k3[1:]),
    }


if __name__ == "__main__":
    sys.exit(main())
