"""Figures of a step that foresee a turn of the reward, and how long before: runs with noise on the routers.

`python -m benchmarks.evidence.early_warning [--out FOLDER ...] [--steps FILE] [--json FILE]`. `FOLDER` holds the runs
of an experiment, `FILE` the steps of runs that were read before. The runs of the folders are added to it, so that later
ones join earlier ones.

A run turns at the step from which on its reward stays below 80% of its best (`router_noise.Course.turned`). At each
step from the 20th on, and until it turns, the figures are means of the last ten steps. A moment counts as before a turn
where the run turns within the next 20, or 50, steps. Moments whose future ended before that are left out.

- The AUROC is taken of a figure in the direction that `FIGURES` fixed before the runs; 0.5 is chance. Its 95% interval
  is a bootstrap over whole runs.
- A warning is the first step at which the figure passes a threshold: the 90th percentile of the moments without a turn
  ahead in all other runs, so no run judges itself. The lead is from there to the turn. A false alarm is a warning in a
  run that does not turn.

Runs with replay and runs without it differ in level, so runs without it are judged by themselves as well.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.evidence.collapse import RESAMPLES, area
from benchmarks.evidence.router_noise import PARTS, SMOOTHED, Course, course_row, smoothed
from benchmarks.options import command_line
from benchmarks.table import Row, report
from moe_trm.tools.quickstart.summary import read_metrics

STEPS = Path("benchmarks/evidence/results/router_noise_steps.json")
K3, REWARD = "engine/k3_kl", "reward/mean"
FIGURES: Mapping[str, tuple[int, Sequence[str]]] = {
    "k3": (1, [K3]),
    "k3_growth": (1, [K3]),
    "beyond_2": (1, PARTS),
    "row_ess": (-1, ["total/rollout_is_seq_eff_sample_size"]),
    "chi2": (1, ["engine/chi2_token_p95"]),
    "clipped": (1, ["loss/pg_clipfrac"]),
    "length": (1, ["response/length_mean"]),
    "grad_norm": (1, ["optimizer/grad_norm"]),
    "below_best": (1, [REWARD]),
}
"""1 where higher values warn, -1 where lower ones do, and the metrics whose sum it is. Growth is over the least so far;
`beyond_2` is the share of tokens whose ratio between the engines is above 2 or below 1/2."""
FIRST, AHEADS, QUIET = 20, (20, 50), 0.9
"""First step that is judged; steps that a moment looks ahead; share of moments without a turn that stay silent."""

Moments = tuple[NDArray[np.float64], NDArray[np.bool_]]


@dataclass(frozen=True)
class Steps:
    """Measurements of a run at each of its steps, by metric."""

    name: str
    series: Mapping[str, Sequence[float]]

    @property
    def replays(self) -> bool:
        """True for the arms with R3."""
        return "R3" in self.name

    @property
    def course(self) -> Course:
        """Its rewards, engine k3 and tail."""
        tail = zip(*(self.series[part] for part in PARTS if part in self.series), strict=True)
        return Course(tuple(self.series[REWARD]), tuple(self.series[K3]), tuple(map(sum, tail)))

    @property
    def turned(self) -> int | None:
        """The step at which the reward turned; None: it never did."""
        return self.course.turned

    def figure(self, name: str) -> NDArray[np.float64] | None:
        """Values from step `FIRST` on, higher before a turn as it was fixed; None: the run did not measure it."""
        sign, metrics = FIGURES[name]
        if not self.series.keys() >= set(metrics):
            return None
        smooth = np.sum([smoothed(self.series[metric]) for metric in metrics], 0)
        if name == "k3_growth":
            smooth = smooth / np.minimum.accumulate(smooth)
        elif name == "below_best":
            smooth = 1 - smooth / np.maximum.accumulate(smooth)
        return np.asarray(sign * smooth[FIRST - SMOOTHED :])

    def moments(self, name: str, ahead: int) -> Moments | None:
        """The figure at each moment that counts, and whether the run turns within so many steps.

        None: the run did not measure it, or is shorter than the first moment.
        """
        values = self.figure(name)
        if values is None or not len(values):
            return None
        steps, turned = np.arange(FIRST, FIRST + len(values)), self.turned
        last = steps[-1]
        turns = np.zeros(len(steps), bool) if turned is None else (steps < turned) & (turned <= steps + ahead)
        counts = (turns | (steps + ahead <= last)) & (steps < (turned or last + 1))
        return values[counts], turns[counts]


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__file__, __doc__)
    parser.add_argument("--out", type=Path, nargs="*", default=[], help="folders whose runs are added")
    parser.add_argument("--steps", type=Path, default=STEPS, help=f"steps of the runs so far (default: {STEPS})")
    args = parser.parse_args(argv)
    runs = gathered(args.steps, args.out)
    rows = [
        row
        for group, group_runs in (("all", runs), ("without replay", [run for run in runs if not run.replays]))
        for ahead in AHEADS
        for name in FIGURES
        if (row := judged(group_runs, name, ahead, group)) is not None
    ]
    courses = [course_row(run.name, run.course) for run in runs]
    report("The course of each run; then how each figure foresees that it turns", [*courses, *rows], args.json)
    return 0


def gathered(file: Path, folders: Sequence[Path]) -> list[Steps]:
    """The runs that were read before and the runs of the folders, which are written to the file."""
    series_by_run: dict[str, Mapping[str, Sequence[float]]] = json.loads(file.read_text()) if file.exists() else {}
    for folder in folders:
        for metrics in sorted(folder.glob("*-seed*/metrics.jsonl")):
            series_by_run[metrics.parent.name] = read(metrics.parent)
    if folders:
        lines = (f"{json.dumps(name)}: {json.dumps(series_by_run[name])}" for name in sorted(series_by_run))
        file.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    return [Steps(name, series_by_run[name]) for name in sorted(series_by_run)]


def read(run: Path) -> dict[str, list[float]]:
    """Four digits of every metric of `FIGURES` that each of the run's steps has."""
    rows = [row for row in read_metrics(run) if REWARD in row]
    metrics = dict.fromkeys(metric for _, parts in FIGURES.values() for metric in parts)
    return {m: [float(f"{row[m]:.4g}") for row in rows] for m in metrics if all(m in row for row in rows)}


def judged(runs: Sequence[Steps], name: str, ahead: int, group: str) -> Row | None:
    """AUROC, warnings, leads and false alarms of a figure; None where nothing turned, or where there is one run."""
    pairs = [(run, run_moments) for run in runs if (run_moments := run.moments(name, ahead)) is not None]
    values, labels = ([run_moments[part] for _, run_moments in pairs] for part in (0, 1))
    if len(pairs) < 2 or len(set(np.concatenate(labels).tolist())) < 2:
        return None
    rng = np.random.default_rng(0)
    draws = [rng.integers(0, len(pairs), len(pairs)) for _ in range(RESAMPLES)]
    resampled = [area(np.concatenate([values[i] for i in d]), np.concatenate([labels[i] for i in d])) for d in draws]
    low, high = np.nanquantile(resampled, [0.025, 0.975])
    turning = [run for run, _ in pairs if run.turned is not None]
    warnings = {run.name: warned for run, warned in _warned(pairs, name)}
    lead_steps = [run.turned - at for run in turning if run.turned and (at := warnings[run.name]) and at < run.turned]
    alarms = [run.name for run, _ in pairs if run.turned is None and warnings[run.name] is not None]
    return {
        "figure": name,
        "runs": group,
        "ahead": ahead,
        "auroc": area(np.concatenate(values), np.concatenate(labels)),
        "low": float(low),
        "high": float(high),
        "moments": sum(map(len, labels)),
        "before_a_turn": int(sum(map(np.sum, labels))),
        "warned": f"{len(lead_steps)} of {len(turning)}",
        "median_lead": statistics.median(lead_steps) if lead_steps else "none",
        "false_alarms": f"{len(alarms)} of {len(pairs) - len(turning)}",
    }


def _warned(pairs: Sequence[tuple[Steps, Moments]], name: str) -> Iterator[tuple[Steps, int | None]]:
    """Each run, and the first step at which it passes the threshold of all others."""
    for run, _ in pairs:
        quiet = [values[~labels] for member, (values, labels) in pairs if member is not run]
        calm, figure = np.concatenate(quiet), run.figure(name)
        above = np.flatnonzero(figure > np.quantile(calm, QUIET)).tolist() if figure is not None and len(calm) else []
        yield run, above[0] + FIRST if above else None


if __name__ == "__main__":
    sys.exit(main())
