"""Figures of the staleness suite from what has run: JSON with every run, and a picture.

`python -m benchmarks.evidence.staleness_figures [FILE] [--out FOLDER] [--json FILE] [--picture FILE]`. `FILE` is the
experiment's, `FOLDER` where it ran. Every arm is compared with training without correction, with synchronous
training and with token weights, by the primary metric and by greedy answers. Runs of the same seed are paired.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

from benchmarks.figure import COLOURS, INK, MUTED, circle, document, text
from benchmarks.options import command_line
from benchmarks.table import Row, report
from moe_trm.experiment.arms import Arm, read_arms
from moe_trm.experiment.commands import about
from moe_trm.experiment.comparison import comparisons
from moe_trm.experiment.plan import make_plan
from moe_trm.experiment.states import States
from moe_trm.report.intervals import around_mean

FILE = Path("benchmarks/evidence/staleness.yaml")
AGAINST = ("none", "sync_R3", "TIS")
METRICS = ("eval/avg_at_1", "eval/accuracy")
LATE = 12
"""First step of the means over late steps, which see samples of nearly the full age."""
LEFT, RIGHT, TOP, LINE = 150, 560, 60, 26


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__file__, __doc__)
    parser.add_argument("file", type=Path, nargs="?", default=FILE, help=f"the experiment's file (default: {FILE})")
    parser.add_argument("--out", type=Path, help="folder of its runs, if not its own")
    parser.add_argument("--picture", type=Path, help="write the figure here, as SVG")
    args = parser.parse_args(argv)
    plan = make_plan(args.file, args.out, lambda _config, _ranks: None)
    states = States(plan)
    arms = [arm for arm in read_arms(plan, states) if arm.runs or arm.failed]
    details = {
        "experiment": about(plan, states),
        "arms": {arm.name: {key: own for key, (_, own) in plan.apart(arm.name).items()} for arm in arms},
        "runs": [
            {"run": s.run, "state": s.state, "attempts": s.attempts, "reason": s.reason, "earlier": s.earlier}
            for arm in arms
            for s in arm.states
        ],
    }
    rows = [*map(arm_row, arms), *(row for against in AGAINST for row in differences(arms, against))]
    report("Held-out success at the end, by arm; then paired differences", rows, args.json, details)
    if args.picture:
        args.picture.write_text(draw(arms), encoding="utf-8")
    return 0


def arm_row(arm: Arm) -> Row:
    """Means over seeds, each run's value, and how far the policies were apart in the late steps."""
    row: Row = {"arm": arm.name, "finished": len(arm.runs), "failed": len(arm.failed)}
    for metric, name in zip(METRICS, ("sampled", "greedy"), strict=True):
        values = arm.values(metric, at_end=True)
        row[name] = fmean(values) if values else "not measured"
        row[f"{name}_runs"] = " ".join(f"{value:.3f}" for value in values) or "not measured"
    for metric, name in (("total/k3_kl", "total_k3"), ("optimizer/grad_norm", "grad_norm")):
        late = [fmean(found) for found in _late(arm, metric)]
        row[name] = fmean(late) if late else "not measured"
    return row


def _late(arm: Arm, metric: str) -> Iterator[list[float]]:
    for run in arm.runs.values():
        found = [value for step, value in run.series(metric) if step >= LATE and value is not None]
        if found:
            yield found


def differences(arms: Sequence[Arm], against: str) -> Iterator[Row]:
    """One row per other arm and metric: the paired difference to `against`, and what may be said."""
    if against not in {arm.name for arm in arms}:
        return
    for metric in METRICS:
        for each in comparisons(arms, against, metric):
            if each.measure.metrics == (metric,):
                low, high = each.difference.interval or ("none", "none")
                yield {
                    "difference": f"{each.other.name} - {against}",
                    "in": metric,
                    "pairs": len(each.pairs),
                    "mean": each.difference.mean,
                    "low": low,
                    "high": high,
                    "p": each.difference.p,
                    "may_be_said": each.certainty,
                }


def draw(arms: Sequence[Arm]) -> str:
    """SVG: every run as a circle, the mean as a line with its 95% interval, an arm to a line; sampled answers."""
    known = [(arm, values) for arm in arms if (values := arm.values(METRICS[0], at_end=True))]
    low, high = (bound(v for _, values in known for v in values) for bound in (min, max))
    low, high = max(0.0, low - 0.08), min(1.0, high + 0.08)

    def x(value: float) -> float:
        return LEFT + (RIGHT - LEFT) * (min(max(value, low), high) - low) / (high - low)

    parts = [text(LEFT, 28, "Held-out success of sampled answers after the last step", size=15, weight=600)]
    bottom = TOP + LINE * len(known)
    ticks = [tick / 20 for tick in range(21) if low <= tick / 20 <= high]
    for tick in ticks:
        parts.append(f'<path d="M{x(tick):.1f} {TOP - 14}V{bottom - 8}" stroke="#e2e8f0"/>')
        parts.append(text(x(tick), bottom + 10, f"{tick:.2f}", anchor="middle", colour=MUTED))
    for place, (arm, values) in enumerate(known):
        y, colour = TOP + LINE * place, COLOURS[place % len(COLOURS)]
        parts.append(text(LEFT - 12, y + 4, f"{arm.name} ({len(values)})", anchor="end", colour=INK))
        interval = around_mean(values)
        if interval is not None:
            parts.append(f'<path d="M{x(interval[0]):.1f} {y}H{x(interval[1]):.1f}" stroke="{colour}"/>')
        parts.append(f'<path d="M{x(fmean(values)):.1f} {y - 7}v14" stroke="{colour}" stroke-width="3"/>')
        parts += [circle(x(value), y, 4, colour) for value in values]
    parts.append(
        text(LEFT, bottom + 32, "circles: runs; bar: mean; line: Student's 95% interval over seeds", colour=MUTED)
    )
    return document(parts, RIGHT + 60, bottom + 50)


if __name__ == "__main__":
    sys.exit(main())
