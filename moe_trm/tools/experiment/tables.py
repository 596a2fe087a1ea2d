"""The tables of an experiment, for its page and for Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from statistics import mean, stdev
from typing import Any

from moe_trm.config.flat import as_yaml
from moe_trm.observe.report.charts import matching
from moe_trm.observe.report.conclusion import MEASURES, reader
from moe_trm.observe.report.html import section, table, text
from moe_trm.observe.report.intervals import around_mean, repetition_noise
from moe_trm.observe.report.scale import short
from moe_trm.tools.experiment.arms import Arm
from moe_trm.tools.experiment.comparison import comparisons
from moe_trm.tools.experiment.fixed import changed_later
from moe_trm.tools.experiment.plan import ExperimentPlan
from moe_trm.tools.experiment.primary import measure_of

Metrics = tuple[tuple[str, str], ...]

MISMATCH: Metrics = (
    ("engine/k3_kl", "engine, k3 KL in nats"),
    ("merged/k3_kl", "engine and lag, k3 KL"),
    ("total/k3_kl", "total, k3 KL"),
    ("routing/flips/engine", "flips between the engines"),
    ("routing/native_flip_rate", "flips, own routes"),
    ("routing/local_flip_rate", "flips, live router against the record"),
    ("replay/applied_fraction", "replayed token-layers that used their record"),
    ("replay/native_fraction", "token-layers left to own routers"),
)
KEPT: Metrics = (
    ("correction/kept_fraction", "tokens"),
    ("correction/kept_sequence_fraction", "sequences"),
    ("acceptance/length_*", "sequences, tokens "),
    ("acceptance/positive", "positive advantage"),
    ("acceptance/negative", "negative advantage"),
    ("acceptance/correct", "answers better than their group"),
    ("acceptance/wrong", "answers worse than their group"),
)
COST: Metrics = (
    ("time/step_s", "seconds of a whole step"),
    ("time/rollout_s", "of these sampling"),
    ("time/update_s", "of these updating"),
    ("time/sync_s", "of these pushing weights"),
)
NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class Table:
    title: str
    note: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        lines = [_row(self.head), _row(["---"] * len(self.head)), *map(_row, self.rows)]
        return "\n".join([f"## {self.title}", "", self.note, "", *(lines if self.rows else ["None."])])

    def html(self) -> str:
        rows = (
            f'<tr><th scope="row">{escape(first)}</th>{"".join(f"<td>{text(cell)}</td>" for cell in rest)}</tr>'
            for first, *rest in self.rows
        )
        body = table(self.head, rows) if self.rows else "<p>None.</p>"
        return section(self.title, f'<p class="note">{escape(self.note)}</p>{body}')


def tables(plan: ExperimentPlan, arms: Sequence[Arm], changes: Sequence[Mapping[str, Any]] = ()) -> list[Table]:
    """All tables, the most important first. Those of figures are of finished runs; the last one has every run."""
    return [
        _matrix(plan, arms),
        _differences(plan, arms),
        *_repetitions(plan, arms),
        _evaluation(plan, arms),
        _figures("Mismatch", arms, MISMATCH),
        _figures("Kept shares", arms, KEPT),
        _cost(arms),
        _settings(plan),
        *([_changed(changes)] if changes else []),
        _runs(arms),
    ]


def _matrix(plan: ExperimentPlan, arms: Sequence[Arm]) -> Table:
    """Figures by arms; every other arm with its paired difference from the baseline."""
    results = comparisons(arms, plan.file.against, plan.file.primary_metric)
    other_arms = [arm.name for arm in arms if arm.name != plan.file.against]
    rows = []
    for measure in dict.fromkeys(comparison.measure for comparison in results):
        by_arm = {comparison.other.name: comparison for comparison in results if comparison.measure is measure}
        base = max(by_arm.values(), key=lambda comparison: len(comparison.pairs)).means[0]
        cells = (
            f"{short(by_arm[name].means[1])} ({by_arm[name].difference_in_words})" if name in by_arm else NOT_MEASURED
            for name in other_arms
        )
        rows.append((measure.words, short(base), *cells))
    return Table(
        "Arms by figures",
        f"Means over the seeds that both have, and in brackets the paired difference from {plan.file.against} with its "
        "95% interval.",
        ("figure", plan.file.against, *other_arms),
        tuple(rows),
    )


def _differences(plan: ExperimentPlan, arms: Sequence[Arm]) -> Table:
    rows = tuple(
        (
            comparison.measure.words,
            comparison.when,
            f"{comparison.other.name} - {comparison.first.name}",
            comparison.difference_in_words,
            f"[{short(comparison.unpaired[0])}, {short(comparison.unpaired[1])}]" if comparison.unpaired else "none",
            ", ".join(f"{seed}: {short(second - first)}" for seed, first, second in comparison.pairs),
            short(comparison.difference.p),
            comparison.certainty,
        )
        for comparison in comparisons(arms, plan.file.against, plan.file.primary_metric)
    )
    return Table(
        "Paired differences",
        "Between runs of the same seed; the primary metric comes first. 95% intervals over seeds: the wider of "
        "Student's and the bootstrap's on each side. Welch's interval takes the same runs as if no seed were shared. p "
        "is of the exact sign-flip test, which three seeds cannot bring below 0.25. Nothing is corrected for the "
        "number of comparisons: of twenty, one interval misleads by chance.",
        ("measure", "when", "arms", "difference", "Welch's interval", "by seed", "p", "conclusion"),
        rows,
    )


def _repetitions(plan: ExperimentPlan, arms: Sequence[Arm]) -> Iterator[Table]:
    """Runs of the baseline that repeat a seed, beside the spread over seeds; nothing where none has finished."""
    first = next(arm for arm in arms if arm.name == plan.file.against)
    seeds = sorted(first.runs.keys() & first.repetitions.keys())
    measures = dict.fromkeys((measure_of(plan.file.primary_metric), *MEASURES))
    rows = []
    for measure in measures:
        read = reader([runs[seed] for runs in (first.runs, first.repetitions) for seed in seeds], measure)
        if not seeds or read is None:
            continue
        pairs = [(read[1](first.runs[seed]), read[1](first.repetitions[seed])) for seed in seeds]
        whole = reader(list(first.runs.values()), measure)
        values = [whole[1](run) for run in first.runs.values()] if whole else []
        by_seed = (f"{seed}: {short(run)}, {short(again)}" for seed, (run, again) in zip(seeds, pairs, strict=True))
        spread = short(stdev(values)) if len(values) > 1 else NOT_MEASURED
        rows.append((measure.words, "; ".join(by_seed), short(repetition_noise(pairs)), spread))
    if rows:
        yield Table(
            "Repetition noise",
            f"{first.name} twice with the same settings and the same seed. Where a repetition is as far as another "
            "seed, a shared seed makes no two runs alike: read Welch's interval instead of the paired one.",
            ("measure", "by seed: first run, second run", "deviation of a repetition", "deviation over seeds"),
            tuple(rows),
        )


def _evaluation(plan: ExperimentPlan, arms: Sequence[Arm]) -> Table:
    metric_names = sorted({name for arm in arms for name in arm.metrics() if name.startswith("eval/")})
    rows = [
        (name, *(_summary(arm.values(name, at_end=True), list_each=True) for arm in arms))
        for name in metric_names
        if any(arm.values(name, at_end=True) for arm in arms)
    ]
    for by in plan.file.evaluations:
        names = sorted({name for arm in arms for metrics in arm.evaluations[by] for name in metrics})
        for name in names:
            values = [[m[name] for m in arm.evaluations[by] if name in m] for arm in arms]
            rows.append(
                (f"{name}, final weights by {by}", *(_summary(arm_values, list_each=True) for arm_values in values))
            )
    return Table(
        "Final held-out evaluation",
        f"After step {plan.file.steps}, answers of the rollout engine unless another is named: mean over seeds, 95% "
        "interval, each run.",
        ("metric", *(arm.name for arm in arms)),
        tuple(rows),
    )


def _figures(title: str, arms: Sequence[Arm], metrics: Metrics) -> Table:
    names = {name for arm in arms for name in arm.metrics()}
    rows = tuple(
        (f"{label} ({name})", *(_summary(arm.values(name)) for arm in arms)) for name, label in matching(metrics, names)
    )
    return Table(
        title,
        "Mean over the training steps that measured it, then over seeds, with a 95% interval.",
        ("metric", *(arm.name for arm in arms)),
        rows,
    )


def _cost(arms: Sequence[Arm]) -> Table:
    steps = _figures("Cost", arms, COST)
    run_seconds = tuple(_summary([state.seconds for state in arm.states if state.state == "finished"]) for arm in arms)
    return Table(
        steps.title,
        f"{steps.note} The whole run is with its start.",
        steps.head,
        (*steps.rows, ("whole run, s", *run_seconds)),
    )


def _settings(plan: ExperimentPlan) -> Table:
    first = plan.file.against
    rows = tuple(
        (arm, key, as_yaml(old), as_yaml(after))
        for arm in plan.file.arms
        for key, (old, after) in plan.apart(arm).items()
    )
    return Table(
        "What sets the arms apart",
        "Resolved settings that differ from the baseline's.",
        ("arm", "setting", f"in {first}", "in the arm"),
        rows,
    )


def _changed(changes: Sequence[Mapping[str, Any]]) -> Table:
    rows = tuple(
        (f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M}", arms, setting, old, after)
        for at, arms, setting, old, after in changed_later(changes)
    )
    return Table(
        "What changed after the first run",
        "Settings of arms of which no run had begun, and settings that a newer version added, at their default.",
        ("UTC", "arms", "setting", "before", "after"),
        rows,
    )


def _runs(arms: Sequence[Arm]) -> Table:
    rows = tuple(
        (
            state.run,
            state.state,
            str(state.steps),
            str(state.attempts),
            f"{state.seconds:.0f}",
            state.code or "not recorded",
            "; ".join([*([state.reason] if state.reason else []), *(f"before: {why}" for why in state.earlier)]),
        )
        for arm in arms
        for state in (*arm.states, *arm.again)
    )
    return Table(
        "Every run",
        "A run that failed is an outcome: it is counted here and beside every conclusion, and is in no mean.",
        ("run", "state", "steps", "attempts", "seconds", "code", "reason"),
        rows,
    )


def _summary(values: Sequence[float], *, list_each: bool = False) -> str:
    if not values:
        return NOT_MEASURED
    interval = around_mean(values)
    reach = f" [{short(interval[0])}, {short(interval[1])}]" if interval else " (one run)"
    listed = f"; {', '.join(map(short, values))}" if list_each and len(values) > 1 else ""
    return f"{short(mean(values))}{reach}{listed}"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"
