"""The page and the Markdown table of an experiment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from moe_trm.observe.report import draw
from moe_trm.observe.report.cards import COLOURS, Cards, framed, legend
from moe_trm.observe.report.draw import Series
from moe_trm.observe.report.html import document, text
from moe_trm.run_folder.run import Run
from moe_trm.tools.experiment.arms import Arm
from moe_trm.tools.experiment.comparison import LEAST_PAIRS, conclusions
from moe_trm.tools.experiment.plan import ExperimentPlan
from moe_trm.tools.experiment.tables import Table, tables

PAGE, TABLE = "report.html", "table.md"


@dataclass(frozen=True)
class Curve:
    """A chart of one metric: a curve for each arm with the interval over its seeds."""

    title: str
    note: str
    metric: str
    log: bool = False


CURVES = (
    Curve("Reward", "Mean of the step's samples.", "reward/mean"),
    Curve("Engine mismatch", "k3 KL in nats at equal weights.", "engine/k3_kl", log=True),
    Curve("Total mismatch", "k3 KL in nats, age and updates included.", "total/k3_kl", log=True),
    Curve("Flips between the engines", "Share of token-layers, on probe steps.", "routing/flips/engine"),
    Curve("Kept tokens", "Share that corrections let into the gradient.", "correction/kept_fraction"),
    Curve("Answer length", "Tokens, mean of the step's samples.", "response/length_mean"),
    Curve("Entropy", "Entropy of the policy's distribution, per token.", "policy/entropy"),
    Curve("Gradient", "Norm before clipping.", "optimizer/grad_norm"),
    Curve("Seconds of a step", "Wall clock, without evaluation.", "time/step_s"),
)


def write(
    plan: ExperimentPlan, arms: Sequence[Arm], about: Sequence[str], changes: Sequence[Mapping[str, Any]] = ()
) -> tuple[Path, Path]:
    """Write `report.html` and `table.md` in the experiment's folder. `about`: when and where. `changes`:
    `Fixed.changes`.
    """
    made = tables(plan, arms, changes)
    page, table = plan.folder / PAGE, plan.folder / TABLE
    page.write_text(render(plan, arms, about, made), encoding="utf-8")
    table.write_text(markdown(plan, arms, about, made), encoding="utf-8")
    return page, table


def summary(plan: ExperimentPlan, arms: Sequence[Arm]) -> list[str]:
    """The conclusion in sentences: what may be said, and how many runs it rests on."""
    file = plan.file
    sentences = conclusions(arms, file.against, file.primary_metric)
    if len(file.seeds) < LEAST_PAIRS:
        sentences.append(f"With fewer than {LEAST_PAIRS} seeds no claim is possible, whatever the figures are.")
    return [*sentences, *(f"{arm.name}: {arm.runs_in_words}." for arm in arms)]


def markdown(plan: ExperimentPlan, arms: Sequence[Arm], about: Sequence[str], made: Sequence[Table]) -> str:
    """The conclusion and every table."""
    lines = [f"# {plan.file.name}", "", " · ".join(about), ""]
    lines += [f"- {sentence}" for sentence in summary(plan, arms)]
    return "\n".join([*lines, "", "\n\n".join(table.markdown() for table in made), ""])


def render(plan: ExperimentPlan, arms: Sequence[Arm], about: Sequence[str], made: Sequence[Table]) -> str:
    """One self-contained page."""
    name = escape(plan.file.name)
    paragraphs = "".join(f"<p>{text(sentence)}</p>" for sentence in summary(plan, arms))
    means = [run for arm in arms if (run := arm.mean_run()) is not None]
    drawn, cards = _curves(plan, arms, means), Cards(means) if means else None
    body = [
        f'<header><h1>{name}</h1><p class="about">{escape(" · ".join(about))}</p></header>',
        f'<section class="conclusion"><h2>Conclusion</h2>{paragraphs}</section>',
        drawn,
        *(table.html() for table in made),
    ]
    if cards is not None:
        all_charts = "<details><summary>Every chart of a report, of the means over seeds</summary>"
        body += [all_charts, *cards.sections(), "</details>"]
    data = cards.data({curve.metric for curve in _requested(plan)}) if cards is not None else {"runs": []}
    return document(plan.file.name, "\n".join(part for part in body if part), data)


def _curves(plan: ExperimentPlan, arms: Sequence[Arm], means: Sequence[Run]) -> str:
    finished = [arm for arm in arms if arm.runs]
    if not finished:
        return "<section><h2>Curves</h2><p>No run has finished yet.</p></section>"
    steps = (min(int(run.rows[0]["step"]) for run in means), max(run.last_step for run in means))
    cards = []
    for curve in _requested(plan):
        series = [
            Series(place, curve.metric, arm.name, place % COLOURS, points, arm.reach(curve.metric))
            for place, (arm, run) in enumerate(zip(finished, means, strict=True))
            if (points := run.series(curve.metric))
        ]
        if any(line.finite for line in series):
            drawing = draw.lines(curve.title, series, steps, log=curve.log, floor=False)
            cards.append(framed(curve.title, curve.note, legend(series) + drawing))
    note = "Means over finished runs, at the steps that all runs of an arm have; areas are 95% intervals over seeds."
    return f'<section><h2>Curves</h2><p class="note">{note}</p><div class="cards">{"".join(cards)}</div></section>'


def _requested(plan: ExperimentPlan) -> Sequence[Curve]:
    primary = plan.file.primary_metric
    first = Curve(primary, "The primary metric.", primary, log=any(c.log for c in CURVES if c.metric == primary))
    return [first, *(curve for curve in CURVES if curve.metric != primary)]
