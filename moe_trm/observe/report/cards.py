"""The report's figures: key figures as tiles, charts as cards, and the numbers that they draw."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from moe_trm.observe.report import draw
from moe_trm.observe.report.charts import SECTIONS, Chart, shown
from moe_trm.observe.report.draw import Series
from moe_trm.observe.report.html import number
from moe_trm.observe.report.summary import TILES
from moe_trm.run_folder.run import Run

COLOURS = 8


class Cards:
    """Draws the charts of `runs` and remembers which metrics it drew."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self._runs = runs
        self._names = [run.name for run in runs] if len(runs) > 1 else []
        self._shown: set[str] = set()
        self._steps = (min(int(run.rows[0]["step"]) for run in runs), max(run.last_step for run in runs))
        self._known = sorted({name for run in runs for name in run.metrics()})

    def data(self, also: Iterable[str] = ()) -> Mapping[str, object]:
        """Every number that is drawn: by run and metric, steps and values as they stand in `metrics.jsonl`.

        `also`: metrics that are drawn elsewhere on the page.
        """
        return {
            "runs": [
                {
                    "name": run.name,
                    "metrics": {
                        name: {"steps": [step for step, _ in points], "values": [value for _, value in points]}
                        for name in sorted(self._shown.union(also))
                        if (points := run.series(name))
                    },
                }
                for run in self._runs
            ]
        }

    def tiles(self) -> str:
        """The few figures to look at first."""
        cards = []
        for tile in TILES:
            lines = []
            for run in self._runs:
                name = next((metric for metric in tile.metrics if run.series(metric)), None)
                if name is None:
                    continue
                self._shown.add(name)
                points = run.series(name)
                first = f"{number(points[0][1])} → " if tile.first and len(points) > 1 else ""
                run_label = f'<span class="whose">{escape(run.name)}</span>' if len(self._runs) > 1 else ""
                lines.append(
                    f'<p class="figure">{first}{number(points[-1][1])} {run_label}</p>{_interval(run, name)}'
                    f"{draw.spark(points, log=tile.log)}"
                )
            if lines:
                cards.append(
                    f'<div class="tile"><h3>{escape(tile.label)}</h3>{"".join(lines)}<p '
                    f'class="note">{escape(tile.note)}</p></div>'
                )
        return f'<section class="tiles" aria-label="Key figures">{"".join(cards)}</section>'

    def sections(self) -> Iterable[str]:
        for section in SECTIONS:
            cards, still = [], []
            for chart in section.chart:
                if line := self._still(chart):
                    still.append(line)
                elif card := self._card(chart):
                    cards.append(card)
            if cards or still:
                few = " few" if len(cards) <= 2 else ""
                drawn = f'<div class="cards{few}">{"".join(cards)}</div>' if cards else ""
                yield f"<section><h2>{escape(section.title)}</h2>{drawn}{_folded(still)}</section>"

    def _still(self, chart: Chart) -> str:
        """A chart that would show nothing but one value of each metric, as a line; empty for any other.

        Runs that have other values than each other are drawn.
        """
        metrics = shown(chart, self._known)
        if chart.kind == "totals":
            return f"<div><dt>{escape(chart.title)}</dt><dd>{escape(chart.nothing)}</dd></div>" if not metrics else ""
        values: dict[str, set[float | None]] = {}
        for name, _ in metrics:
            for run in self._runs:
                points = run.series(name)
                if len(points) == 1:
                    return ""
                values.setdefault(name, set()).update(value for _, value in points)
        values = {name: seen for name, seen in values.items() if seen}
        if not values or any(len(seen) > 1 or None in seen for seen in values.values()):
            return ""
        if chart.kind != "lines" and len(set.union(*values.values())) > 1:
            return ""
        self._shown |= values.keys()
        labels = dict(metrics)
        values_text = ", ".join(
            f"{escape(labels[name]) or escape(chart.title)} <b>{number(next(iter(seen)))}</b>"
            for name, seen in values.items()
        )
        return f"<div><dt>{escape(chart.title)}</dt><dd>{values_text}</dd></div>"

    def _card(self, chart: Chart) -> str:
        metrics = shown(chart, self._known)
        if chart.kind == "totals":
            return self._totals(chart, metrics)
        series = [
            Series(run, name, label, place % COLOURS, points, _reach(run_data, name))
            for place, (name, label) in enumerate(metrics)
            for run, run_data in enumerate(self._runs)
            if (points := run_data.series(name))
        ]
        if not any(value is not None for run_data in series for _, value in run_data.points):
            return ""
        self._shown |= {run_data.metric for run_data in series} | {
            f"{run_data.metric}_se" for run_data in series if run_data.reach
        }
        if chart.kind == "lines":
            drawing = draw.lines(chart.title, series, self._steps, log=chart.log, floor=chart.floor)
            return framed(
                chart.title, chart.note, legend(series, self._names) + drawing, _left_out(series, log=chart.log)
            )
        parts = []
        for place, run in enumerate(self._runs):
            run_series = [run_data for run_data in series if run_data.run == place]
            if run_series:
                parts.append(f'<p class="whose">{escape(run.name)}</p>' if len(self._runs) > 1 else "")
                if chart.kind == "heat":
                    parts.append(
                        self._shades(chart, run_series) + draw.heat(chart.title, run_series, self._steps, chart.top)
                    )
                else:
                    parts.append(legend(run_series, self._names) + draw.stack(chart.title, run_series, self._steps))
        return framed(chart.title, chart.note, "".join(parts), _left_out(series, log=False))

    def _shades(self, chart: Chart, rows: Sequence[Series]) -> str:
        most = max((value for row in rows for _, value in row.finite), default=1.0)
        return f'<p class="shades">0 <i></i> {number(most) if chart.top is None else f"{chart.top:g}"}</p>'

    def _totals(self, chart: Chart, metrics: Sequence[tuple[str, str]]) -> str:
        self._shown |= {name for name, _ in metrics}
        bars = [
            (run, name, label, run.series(name)[-1][1] or 0.0)
            for name, label in metrics
            for run in self._runs
            if run.series(name)
        ]
        if not bars:
            return framed(chart.title, chart.note, f'<p class="quiet">{escape(chart.nothing)}</p>')
        most = max(value for *_, value in bars) or 1.0
        rows = "".join(
            f'<tr><th scope="row">{escape(label)}{" " + escape(run.name) if len(self._runs) > 1 else ""}</th>'
            f'<td>{number(value)}</td><td class="bar"><i style="width:{100 * value / most:.1f}%"></i></td></tr>'
            for run, _, label, value in bars
        )
        return framed(chart.title, chart.note, f'<table class="bars">{rows}</table>')


def framed(title: str, note: str, content: str, remark: str = "") -> str:
    """A card around a drawing."""
    about = f'<p class="note">{escape(note)}</p>' if note else ""
    return f'<figure class="card"><figcaption><h3>{escape(title)}</h3>{about}</figcaption>{content}{remark}</figure>'


def legend(series: Sequence[Series], names: Sequence[str] = ()) -> str:
    """The last value of every curve, with its run's name where there are `names`."""
    items = "".join(
        f'<li><i class="f{curve.colour}{draw.dashes(curve.run)}"></i>{escape(curve.label)}'
        f"{f' {escape(names[curve.run])}' if names else ''} <b>{number(curve.points[-1][1])}</b></li>"
        for curve in series
    )
    return f'<ul class="legend">{items}</ul>'


def _reach(run: Run, metric: str) -> list[tuple[int, float, float]]:
    """Two standard errors to either side, where the metric has one."""
    errors = {step: error for step, error in run.series(f"{metric}_se") if error is not None}
    return [
        (step, value - 2 * errors[step], value + 2 * errors[step])
        for step, value in run.series(metric)
        if value is not None and step in errors
    ]


def _interval(run: Run, metric: str) -> str:
    """The interval of the last value, where it has one."""
    reach, points = _reach(run, metric), run.series(metric)
    if not reach or reach[-1][0] != points[-1][0]:
        return ""
    _, low, high = reach[-1]
    return f'<p class="note">last: 95% interval {number(low)} to {number(high)}</p>'


def _folded(lines: Sequence[str]) -> str:
    if not lines:
        return ""
    many = "1 chart is" if len(lines) == 1 else f"{len(lines)} charts are"
    return (
        f'<details class="still"><summary>{many} not drawn: the value never changed</summary>'
        f"<dl>{''.join(lines)}</dl></details>"
    )


def _left_out(series: Sequence[Series], *, log: bool) -> str:
    infinite = sum(value is None for curve in series for _, value in curve.points)
    below = sum(value <= 0 for curve in series for _, value in curve.finite) if log else 0
    reasons = [f"values that were not finite ({infinite})"] if infinite else []
    reasons += [f"values of 0 or less, on a logarithmic axis ({below})"] if below else []
    return f'<p class="note">Not drawn: {"; ".join(reasons)}.</p>' if reasons else ""
