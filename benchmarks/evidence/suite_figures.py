"""Figures of a suite of runs: JSON with every run, a table in Markdown, and a picture.

`python -m benchmarks.evidence.suite_figures [FILE] [--out FOLDER] [--joined FILE] [--json FILE] [--table FILE]
[--picture FILE]`. `FILE` is the experiment's, and `FOLDER` where it ran. `--joined` names the JSON of earlier runs of
the same file, whose folder is gone: seeds that the folder lacks are taken from it. `benchmarks/evidence/suites.py`
lists the comparisons. Differences are taken between runs of the same seed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, linear_regression
from typing import Any

from benchmarks.evidence.suites import SUITES, Figure, Gain, LengthSlope, Suite
from benchmarks.figure import COLOURS, INK, MUTED, circle, document, text
from benchmarks.options import command_line
from benchmarks.table import Row, report
from moe_trm.observe.report.conclusion import Measure
from moe_trm.observe.report.intervals import around_mean
from moe_trm.observe.report.scale import short
from moe_trm.run_folder.run import Run
from moe_trm.tools.experiment.arms import Arm, read_arms
from moe_trm.tools.experiment.commands import about
from moe_trm.tools.experiment.comparison import Comparison
from moe_trm.tools.experiment.plan import make_plan
from moe_trm.tools.experiment.progress import RunState, States
from moe_trm.tools.experiment.tables import NOT_MEASURED, Table

FILE = Path("benchmarks/evidence/staleness.yaml")
LEFT, RIGHT, TOP, LINE = 150, 560, 60, 26
STATE = ("state", "reason", "attempts", "earlier")
"""Fields of the state of a run that the JSON keeps."""
EARLIER = "earlier/{}"
"""Where the run of an earlier report has a figure that was computed there."""
TICK = 40
"""Least distance of two labels of the axis."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__file__, __doc__)
    parser.add_argument("file", type=Path, nargs="?", default=FILE, help=f"the experiment's file (default: {FILE})")
    parser.add_argument("--out", type=Path, help="folder of its runs, if not its own")
    parser.add_argument("--joined", type=Path, help="earlier figures of the same file, whose seeds are added")
    parser.add_argument("--table", type=Path, help="write the tables here, in Markdown")
    parser.add_argument("--picture", type=Path, help="write the figure here, as SVG")
    args = parser.parse_args(argv)
    plan = make_plan(args.file, args.out, lambda _config, _ranks: None)
    states = States(plan)
    suite = SUITES[plan.file.name]
    earlier = json.loads(args.joined.read_text(encoding="utf-8")) if args.joined else {"rows": [], "runs": []}
    arms = [joined(arm, earlier, suite, plan.file.steps) for arm in read_arms(plan, states)]
    arms = [arm for arm in arms if arm.runs or arm.failed]
    differences = list(comparisons(arms, suite))
    details = {
        "experiment": about(plan, states),
        **({"joined": earlier["experiment"]} if args.joined else {}),
        "arms": {arm.name: {key: value for key, (_, value) in plan.apart(arm.name).items()} for arm in arms},
        "runs": [{"run": s.run, **{key: getattr(s, key) for key in STATE}} for arm in arms for s in arm.states],
    }
    rows = [*(arm_row(arm, suite) for arm in arms), *map(difference_row, differences)]
    report("Held-out success at the end, by arm; then paired differences", rows, args.json, details)
    if args.table:
        parts = [made.markdown() for made in (arm_table(arms, suite), difference_table(differences))]
        args.table.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    if args.picture:
        args.picture.write_text(draw(arms, suite), encoding="utf-8")
    return 0


def joined(arm: Arm, earlier: Mapping[str, Any], suite: Suite, last: int) -> Arm:
    """The arm with the seeds that it lacks, as far as the earlier report has their figures of one metric."""
    states, rows = {state.seed: state for state in arm.states}, dict[int, dict[str, float]]()
    for state in earlier["runs"]:
        name, _, seed = state["run"].rpartition("-seed")
        if name == arm.name and int(seed) not in arm.runs:
            kept = {key: state[key] for key in STATE}
            states[int(seed)] = RunState(run=state["run"], arm=name, seed=int(seed), **kept)
        if name == arm.name and state["state"] == "finished":
            rows[int(seed)] = {"step": last}
    earlier_row: Row = next((row for row in earlier["rows"] if row.get("arm") == arm.name), {})
    answers_by = dict[str, dict[int, Mapping[str, float]]]()
    for figure in (*suite.compared, *suite.beside):
        words = str(earlier_row.get(f"{figure.name}_runs", NOT_MEASURED))
        if words == NOT_MEASURED or len(words.split()) != len(rows):
            continue
        for (seed, row), value in zip(rows.items(), map(float, words.split()), strict=True):
            if figure.by is None:
                row[EARLIER.format(figure.name)] = value
            else:
                answers = answers_by.setdefault(figure.by, {})
                answers[seed] = {**answers.get(seed, {}), figure.metrics[0]: value}
    runs = {seed: Run(Path(f"{arm.name}-seed{seed}"), {}, [row], ()) for seed, row in rows.items()} | dict(arm.runs)
    ordered = tuple(states[seed] for seed in sorted(states))
    runs = dict(sorted(runs.items()))
    for by, of_runs in arm.evaluations.items():
        answers_by.setdefault(by, {}).update(zip(arm.runs, of_runs, strict=True))
    evaluations = {by: [answers.get(seed, {}) for seed in runs] for by, answers in answers_by.items()}
    return Arm(arm.name, runs, ordered, evaluations)


def values(arm: Arm, figure: Figure, late: int) -> dict[int, float]:
    """The finite value of each finished run that has one, by seed."""
    if figure.by is not None:
        if figure.by not in arm.evaluations:
            return {}
        pairs = zip(arm.runs, arm.evaluations[figure.by], strict=True)
        return {
            seed: sum(answers[m] for m in figure.metrics)
            for seed, answers in pairs
            if answers.keys() >= set(figure.metrics)
        }
    by_seed = {seed: _value(run, figure, late) for seed, run in arm.runs.items()}
    return {seed: value for seed, value in by_seed.items() if value is not None}


def _value(run: Run, figure: Figure, late: int) -> float | None:
    """A figure that the run measured itself; None where a part of it is missing."""
    for _, value in run.series(EARLIER.format(figure.name)):
        return value
    if isinstance(figure, LengthSlope):
        return _length_slope(run, figure)
    parts = [_late(run, metric, late) for metric in figure.metrics]
    present = [part for part in parts if part is not None]
    return sum(present) if len(present) == len(parts) else None


def _length_slope(run: Run, figure: LengthSlope) -> float | None:
    """See `LengthSlope`. None where fewer than two evaluations found a right answer."""
    series = [{step: p for step, p in run.series(metric) if p is not None} for metric in figure.metrics]
    points = dict[int, float]()
    for step in sorted(set.intersection(*(set(shares) for shares in series))):
        shares = [of_metric[step] for of_metric in series]
        if sum(shares):
            points[step] = sum(p * length for p, length in zip(shares, figure.lengths, strict=True)) / sum(shares)
    return linear_regression(list(points), list(points.values())).slope if len(points) > 1 else None


def _late(run: Run, metric: str, late: int) -> float | None:
    points = [(step, value) for step, value in run.series(metric) if value is not None]
    if metric.startswith("eval/"):
        counted = [value for step, value in points if step == run.last_step]
    else:
        counted = [value for step, value in points if step >= late]
    return fmean(counted) if counted else None


def arm_row(arm: Arm, suite: Suite) -> Row:
    """Means over seeds, and each run's value."""
    row: Row = {"arm": arm.name, "finished": len(arm.runs), "failed": len(arm.failed)}
    for figure in (*suite.compared, *suite.beside):
        numbers = values(arm, figure, suite.late).values()
        row[figure.name] = fmean(numbers) if numbers else NOT_MEASURED
        row[f"{figure.name}_runs"] = " ".join(f"{value:.4g}" for value in numbers) or NOT_MEASURED
    return row


def comparisons(arms: Sequence[Arm], suite: Suite) -> Iterator[Comparison]:
    """Every difference of which a seed has both sides: arm by arm, then between gains."""
    by_name = {arm.name: arm for arm in arms}
    for first, bases in suite.against.items():
        for figure in suite.compared:
            for base in bases or [name for name in by_name if name != first]:
                if first in by_name and base in by_name:
                    sides = {name: values(by_name[name], figure, suite.late) for name in (first, base)}
                    yield from _paired(by_name[first], sides[first], by_name[base], sides[base], figure)
    for gains in suite.crossings:
        if all(name in by_name for gain in gains for name in gain):
            for figure in suite.compared:
                first_gain, second_gain = (_gain(by_name, gain, figure, suite.late) for gain in gains)
                yield from _paired(*first_gain, *second_gain, figure)


def _gain(by_name: Mapping[str, Arm], gain: Gain, figure: Figure, late: int) -> tuple[Arm, dict[int, float]]:
    """The difference of two arms as if it were an arm, with its value for each seed that both have."""
    above, below = (values(by_name[name], figure, late) for name in gain)
    difference = Arm(" - ".join(gain), {}, tuple(state for name in gain for state in by_name[name].states))
    return difference, {seed: above[seed] - below[seed] for seed in above.keys() & below.keys()}


def _paired(
    first: Arm, low: Mapping[int, float], second: Arm, high: Mapping[int, float], figure: Figure
) -> Iterator[Comparison]:
    pairs = tuple((seed, low[seed], high[seed]) for seed in sorted(low.keys() & high.keys()))
    if pairs:
        yield Comparison(Measure(figure.source, " + ".join(figure.metrics)), "", first, second, pairs)


def difference_row(comparison: Comparison) -> Row:
    """A paired difference, and how certain it is."""
    low, high = comparison.difference.interval or ("none", "none")
    return {
        "difference": _name(comparison),
        "in": comparison.measure.words,
        "pairs": len(comparison.pairs),
        "mean": comparison.difference.mean,
        "low": low,
        "high": high,
        "p": comparison.difference.p,
        "may_be_said": comparison.certainty,
    }


def _name(comparison: Comparison) -> str:
    names = (comparison.other.name, comparison.first.name)
    return " - ".join(f"({name})" if " - " in name else name for name in names)


def arm_table(arms: Sequence[Arm], suite: Suite) -> Table:
    """Means over seeds with their intervals."""
    figures = (*suite.compared, *suite.beside)
    rows = tuple(
        (
            arm.name,
            arm.runs_in_words,
            *(_mean_text(list(values(arm, figure, suite.late).values())) for figure in figures),
        )
        for arm in arms
    )
    note = f"Means over seeds with 95% intervals. Figures that are no evaluations are means from step {suite.late} on."
    return Table("Arms", note, ("arm", "runs", *(figure.source for figure in figures)), rows)


def difference_table(comparisons: Sequence[Comparison]) -> Table:
    """Paired differences, and how certain they are."""
    rows = tuple(
        (
            _name(comparison),
            comparison.measure.words,
            str(len(comparison.pairs)),
            comparison.difference_in_words,
            comparison.certainty,
        )
        for comparison in comparisons
    )
    note = "Between runs of the same seed. Nothing is corrected for the number of comparisons."
    return Table("Paired differences", note, ("arms", "in", "pairs", "difference", "may be said"), rows)


def _mean_text(numbers: Sequence[float]) -> str:
    if not numbers:
        return NOT_MEASURED
    interval = around_mean(numbers)
    return short(fmean(numbers)) + (f" [{short(interval[0])}, {short(interval[1])}]" if interval else " (one run)")


def draw(arms: Sequence[Arm], suite: Suite) -> str:
    """SVG: every run as a circle, the mean as a line with its 95% interval, an arm to a line; the first figure."""
    shown = [(arm, list(by_seed.values())) for arm in arms if (by_seed := values(arm, suite.compared[0], suite.late))]
    low, high = (bound(v for _, numbers in shown for v in numbers) for bound in (min, max))
    low, high = max(0.0, low - 0.08), min(1.0, high + 0.08)

    def x(value: float) -> float:
        return LEFT + (RIGHT - LEFT) * (min(max(value, low), high) - low) / (high - low)

    parts = [text(LEFT, 28, suite.title, size=15, weight=600)]
    bottom = TOP + LINE * len(shown)
    spacing = next(spacing for spacing in (1, 2, 4) if (RIGHT - LEFT) * spacing / 20 >= TICK * (high - low))
    ticks = [tick / 20 for tick in range(0, 21, spacing) if low <= tick / 20 <= high]
    for tick in ticks:
        parts.append(f'<path d="M{x(tick):.1f} {TOP - 14}V{bottom - 8}" stroke="#e2e8f0"/>')
        parts.append(text(x(tick), bottom + 10, f"{tick:.2f}", anchor="middle", colour=MUTED))
    for place, (arm, numbers) in enumerate(shown):
        y, colour = TOP + LINE * place, COLOURS[place % len(COLOURS)]
        parts.append(text(LEFT - 12, y + 4, f"{arm.name} ({len(numbers)})", anchor="end", colour=INK))
        interval = around_mean(numbers)
        if interval is not None:
            parts.append(f'<path d="M{x(interval[0]):.1f} {y}H{x(interval[1]):.1f}" stroke="{colour}"/>')
        parts.append(f'<path d="M{x(fmean(numbers)):.1f} {y - 7}v14" stroke="{colour}" stroke-width="3"/>')
        parts += [circle(x(value), y, 4, colour) for value in numbers]
    parts.append(
        text(LEFT, bottom + 32, "circles: runs; bar: mean; line: Student's 95% interval over seeds", colour=MUTED)
    )
    return document(parts, RIGHT + 60, bottom + 50)


if __name__ == "__main__":
    sys.exit(main())
