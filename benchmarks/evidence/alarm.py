"""The alarm of the verdict on every recorded run, and the seeds' second conjecture on the steps of real engines.

`python -m benchmarks.evidence.alarm [--json FILE]` reads the courses of 112 runs and the steps of 46 of them. It starts
nothing.

- The alarm is a mean tail of ten steps above 5%. Runs at risk have the large noise on their routers and no replay: all
  others are far below it, so counting them means little. Intervals of shares are Clopper and Pearson's.
- The AUROC of the tail among runs at risk, of all of them, and within each draw of the noise (a seed).
- The second conjecture: four figures (chi2 of tokens, effective sample size of rows, clipped share, length) predict a
  turn within 200 updates, which are 50 steps here, with an AUROC of 0.90 or more, and signals of the stack (engine k3
  and the tail) add 0.03 at most. A logistic regression is fitted on the runs of all other seeds. Runs without a clip
  lack a figure and are left out.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.evidence.collapse import area, logistic
from benchmarks.evidence.early_warning import STEPS, Moments, Steps, gathered
from benchmarks.evidence.router_noise import course_row
from benchmarks.options import command_line
from benchmarks.table import Row, report

COURSES = [Path(f"benchmarks/evidence/results/{name}_courses.json") for name in ("later", "latest")]
WITHOUT_RISK = ("R3", "dose_", "published_", "no_noise")
"""Beginnings of the names of arms with replay, little noise or none."""
FIGURES = ("chi2", "row_ess", "clipped", "length")
SIGNALS = ("k3", "beyond_2")
LOGARITHMIC = ("chi2", "row_ess", "length", "k3", "beyond_2")
AHEAD = 50
"""Steps of four updates each."""


def main(argv: Sequence[str] | None = None) -> int:
    args = command_line(__file__, __doc__).parse_args(argv)
    runs = gathered(STEPS, [])
    courses = [course_row(run.name, run.course) for run in runs]
    for path in COURSES:
        courses += json.loads(path.read_text(encoding="utf-8"))["rows"]
    report("The alarm, then the AUROC of the tail, then the second conjecture", list(judged(runs, courses)), args.json)
    return 0


def judged(runs: Sequence[Steps], courses: Sequence[Row]) -> Iterator[Row]:
    """All rows."""
    for group, group_courses in (("all", courses), ("at risk", [row for row in courses if at_risk(str(row["run"]))])):
        yield alarms(group, group_courses)
    risky = [run for run in runs if at_risk(run.name)]
    for group, members in (("all", risky), *((f"seed {seed}", _of_seed(risky, seed)) for seed in seeds(risky))):
        moments = [pair for run in members if (pair := run.moments("beyond_2", 20)) is not None]
        values, turns = (np.concatenate([pair[part] for pair in moments]) for part in (0, 1))
        if turns.any():
            yield {"tail_at_risk": group, "auroc": area(values, turns), "before_a_turn": int(turns.sum())}
    groups: dict[str, Sequence[Steps]] = {"all": runs, "at risk": risky}
    for kind, judged_runs in groups.items():
        for name, figures in (("four figures", FIGURES), ("and k3, tail", (*FIGURES, *SIGNALS))):
            measured = [run for run in judged_runs if all(run.figure(figure) is not None for figure in figures)]
            yield {
                "second_conjecture": kind,
                "figures": name,
                "runs": len(measured),
                "auroc": foreseen(measured, figures),
            }


def at_risk(run: str) -> bool:
    """True where the alarm could ring: the large noise, and no replay."""
    return not run.rpartition("/")[2].startswith(WITHOUT_RISK)


def seeds(runs: Sequence[Steps]) -> list[str]:
    """The seeds of these runs; each is a draw of the noise."""
    return sorted({_seed(run) for run in runs})


def _seed(run: Steps) -> str:
    return run.name.rpartition("-seed")[2]


def _of_seed(runs: Sequence[Steps], seed: str) -> list[Steps]:
    return [run for run in runs if _seed(run) == seed]


def alarms(group: str, courses: Sequence[Row]) -> Row:
    """Counts of runs that turned, of warnings before a turn, and of alarms in other runs."""
    turned = [row for row in courses if row["reward_turned_at"] != "never"]
    calm = [row for row in courses if row["reward_turned_at"] == "never"]
    warned = [
        row for row in turned if row["warned_at"] != "never" and int(row["warned_at"]) < int(row["reward_turned_at"])
    ]
    falsely = [row for row in calm if row["warned_at"] != "never"]
    low, high = share_interval(len(falsely), len(calm))
    return {
        "alarm": group,
        "runs": len(courses),
        "warned": f"{len(warned)} of {len(turned)}",
        "falsely": f"{len(falsely)} of {len(calm)}",
        "false": len(falsely) / len(calm),
        "low": low,
        "high": high,
    }


def share_interval(hits: int, trials: int) -> tuple[float, float]:
    """Clopper and Pearson's 95% interval of a share, 1934."""

    def above(share: float) -> float:
        return math.fsum(math.comb(trials, k) * share**k * (1 - share) ** (trials - k) for k in range(hits, trials + 1))

    def below(share: float) -> float:
        return math.fsum(math.comb(trials, k) * share**k * (1 - share) ** (trials - k) for k in range(hits + 1))

    return (
        bisected(lambda share: above(share) < 0.025) if hits else 0.0,
        bisected(lambda share: below(share) > 0.025) if hits < trials else 1.0,
    )


def bisected(holds: Callable[[float], bool]) -> float:
    """The share between 0 and 1 up to which it holds."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def foreseen(runs: Sequence[Steps], figures: Sequence[str]) -> float:
    """AUROC of a regression on the figures, each run scored by the fit to all other seeds."""
    moments = [(run, pair) for run in runs if (pair := joined(run, figures)) is not None]
    scores, labels = list[NDArray[np.float64]](), list[NDArray[np.bool_]]()
    for run, (values, turns) in moments:
        rest = [pair for member, pair in moments if _seed(member) != _seed(run)]
        predict = logistic(np.concatenate([pair[0] for pair in rest]), np.concatenate([pair[1] for pair in rest]))
        scores.append(predict(values))
        labels.append(turns)
    return area(np.concatenate(scores), np.concatenate(labels))


def joined(run: Steps, figures: Sequence[str]) -> Moments | None:
    """The figures `[N, F]` at each moment that counts, on scales on which a line can separate, and its label."""
    figure_moments = [pair for figure in figures if (pair := run.moments(figure, AHEAD)) is not None]
    if len(figure_moments) < len(figures):
        return None
    columns = [
        np.log(np.abs(values) + 1e-6) if figure in LOGARITHMIC else values
        for figure, (values, _) in zip(figures, figure_moments, strict=True)
    ]
    return np.stack(columns, 1), figure_moments[0][1]


if __name__ == "__main__":
    sys.exit(main())
