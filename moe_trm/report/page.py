"""The report page: runs in, one self-contained HTML document out."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape

from moe_trm.config.flat import as_yaml, different_keys, flatten
from moe_trm.report import draw
from moe_trm.report.charts import SECTIONS, Chart, Heat, Lines, Totals, shown
from moe_trm.report.draw import Series
from moe_trm.report.html import document, number
from moe_trm.report.run import Run
from moe_trm.report.summary import Check, Saying, checks, sayings, tiles

COLOURS = 8


def render(runs: Sequence[Run]) -> str:
    """The report of one run, or of two side by side."""
    page = Page(runs)
    title = " and ".join(run.name for run in runs)
    body = [
        f"<header><h1>{escape(title)}</h1>{''.join(_state(run, many=len(runs) > 1) for run in runs)}</header>",
        _compared(runs) if len(runs) > 1 else "",
        *(_verdict_now(run, many=len(runs) > 1) for run in runs),
        page.tiles(),
        *(_proofs(run, many=len(runs) > 1) for run in runs),
        *page.sections(),
        _verdicts(runs),
        *(_transcripts(run) for run in runs),
        *(_settings(run) for run in runs),
        _everything(runs),
    ]
    return document(title, "\n".join(part for part in body if part), page.data())


class Page:
    """Draws the charts of `runs` and remembers which metrics it drew."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self._runs = runs
        self._shown: set[str] = set()
        self._steps = (min(int(run.rows[0]["step"]) for run in runs), max(run.last_step for run in runs))
        self._known = sorted({name for run in runs for name in run.metrics()})

    def data(self) -> Mapping[str, object]:
        """Every number that is drawn: by run and metric, steps and values as they stand in `metrics.jsonl`."""
        return {
            "runs": [
                {
                    "name": run.name,
                    "metrics": {
                        name: {"steps": [step for step, _ in points], "values": [value for _, value in points]}
                        for name in sorted(self._shown)
                        if (points := run.series(name))
                    },
                }
                for run in self._runs
            ]
        }

    def tiles(self) -> str:
        """The few figures to look at first."""
        cards = []
        for tile in tiles():
            lines = []
            for run in self._runs:
                name = next((metric for metric in tile.metrics if run.series(metric)), None)
                if name is None:
                    continue
                self._shown.add(name)
                points = run.series(name)
                first = f"{number(points[0][1])} → " if tile.first and len(points) > 1 else ""
                whose = f'<span class="whose">{escape(run.name)}</span>' if len(self._runs) > 1 else ""
                lines.append(
                    f'<p class="figure">{first}{number(points[-1][1])} {whose}</p>{draw.spark(points, log=tile.log)}'
                )
            if lines:
                cards.append(
                    f'<div class="tile"><h3>{escape(tile.label)}</h3>{"".join(lines)}<p class="note">{escape(tile.note)}</p></div>'
                )
        return f'<section class="tiles" aria-label="Key figures">{"".join(cards)}</section>'

    def sections(self) -> Iterable[str]:
        for section in SECTIONS:
            cards = [card for chart in section.charts if (card := self._card(chart))]
            if cards:
                yield f'<section><h2>{escape(section.title)}</h2><div class="cards">{"".join(cards)}</div></section>'

    def _card(self, chart: Chart) -> str:
        found = shown(chart, self._known)
        if isinstance(chart, Totals):
            return self._totals(chart, found)
        series = [
            Series(run, name, label, place % COLOURS, points)
            for place, (name, label) in enumerate(found)
            for run, each in enumerate(self._runs)
            if (points := each.series(name))
        ]
        if not any(value is not None for each in series for _, value in each.points):
            return ""
        self._shown |= {each.metric for each in series}
        if isinstance(chart, Lines):
            drawing = draw.lines(chart.title, series, self._steps, log=chart.log, floor=chart.floor)
            return self._frame(chart, self._legend(series) + drawing, _left_out(series, log=chart.log))
        parts = []
        for place, run in enumerate(self._runs):
            own = [each for each in series if each.run == place]
            if own:
                parts.append(f'<p class="whose">{escape(run.name)}</p>' if len(self._runs) > 1 else "")
                if isinstance(chart, Heat):
                    parts.append(self._shades(chart, own) + draw.heat(chart.title, own, self._steps, chart.top))
                else:
                    parts.append(self._legend(own) + draw.stack(chart.title, own, self._steps))
        return self._frame(chart, "".join(parts), _left_out(series, log=False))

    def _frame(self, chart: Chart, content: str, remark: str = "") -> str:
        note = f'<p class="note">{escape(chart.note)}</p>' if chart.note else ""
        return f'<figure class="card"><figcaption><h3>{escape(chart.title)}</h3>{note}</figcaption>{content}{remark}</figure>'

    def _legend(self, series: Sequence[Series]) -> str:
        items = []
        for each in series:
            last = each.points[-1][1]
            whose = f" {escape(self._runs[each.run].name)}" if len(self._runs) > 1 else ""
            dashed = " dashed" if each.run else ""
            items.append(
                f'<li><i class="f{each.colour}{dashed}"></i>{escape(each.label)}{whose} <b>{number(last)}</b></li>'
            )
        return f'<ul class="legend">{"".join(items)}</ul>'

    def _shades(self, chart: Heat, rows: Sequence[Series]) -> str:
        most = max((value for each in rows for _, value in each.finite), default=1.0)
        return f'<p class="shades">0 <i></i> {number(most) if chart.top is None else f"{chart.top:g}"}</p>'

    def _totals(self, chart: Totals, found: Sequence[tuple[str, str]]) -> str:
        self._shown |= {name for name, _ in found}
        bars = [
            (run, name, label, run.series(name)[-1][1] or 0.0)
            for name, label in found
            for run in self._runs
            if run.series(name)
        ]
        if not bars:
            return self._frame(chart, f'<p class="quiet">{escape(chart.nothing)}</p>')
        most = max(value for *_, value in bars) or 1.0
        rows = "".join(
            f'<tr><th scope="row">{escape(label)}{" " + escape(run.name) if len(self._runs) > 1 else ""}</th>'
            f'<td>{number(value)}</td><td class="bar"><i style="width:{100 * value / most:.1f}%"></i></td></tr>'
            for run, _, label, value in bars
        )
        return self._frame(chart, f'<table class="bars">{rows}</table>')


def _left_out(series: Sequence[Series], *, log: bool) -> str:
    infinite = sum(value is None for each in series for _, value in each.points)
    below = sum(value <= 0 for each in series for _, value in each.finite) if log else 0
    said = [f"values that were not finite ({infinite})"] if infinite else []
    said += [f"values of 0 or less, on a logarithmic axis ({below})"] if below else []
    return f'<p class="note">Not drawn: {"; ".join(said)}.</p>' if said else ""


def _state(run: Run, *, many: bool) -> str:
    planned = f" of {run.planned_steps}" if run.planned_steps is not None else ""
    when = run.rows[-1].get("time/unix_s")
    written = f", last written {_when(when)}" if when else ""
    state = "complete" if run.complete else "stopped early or still running"
    model = run.config.get("model", {}).get("checkpoint")
    about = [f"step {run.last_step}{planned}{written}: {state}"]
    about += [f"model {model}"] if model else []
    about += [f"replay {run.config['replay']['mode']}"] if "mode" in run.config.get("replay", {}) else []
    notes = "".join(f'<p class="warning">{escape(note)}</p>' for note in run.notes)
    whose = f"<strong>{escape(run.name)}</strong> " if many else ""
    return f'<p class="about">{whose}{escape(" · ".join(about))}</p>{notes}'


def _verdict_now(run: Run, *, many: bool) -> str:
    said = sayings(run)
    if not said:
        return ""
    latest = said[-1]
    whose = f"{escape(run.name)}: " if many else ""
    advice = f"<p>Try <code>{escape(latest.setting)}</code></p>" if latest.setting else ""
    head = (
        "Nothing to change"
        if latest.state == "good"
        else "Look at this"
        if latest.state == "bad"
        else "Not yet healthy"
    )
    return (
        f'<section class="verdict {latest.state}" aria-label="Verdict"><h2>{whose}{head}</h2>'
        f"<p>{escape(run.rows[-1].get('verdict', latest.sentence))}</p>{advice}{_ribbon(run, said)}</section>"
    )


def _ribbon(run: Run, said: Sequence[Saying]) -> str:
    """The verdicts over the run as one strip."""
    first, last = said[0].step, run.last_step
    if len(said) < 2:
        return ""
    ends = [*(saying.step for saying in said[1:]), last + 1]
    pieces = "".join(
        f'<i class="{saying.state}" style="flex-grow:{end - saying.step}" title="from step {saying.step}: {escape(saying.sentence)}"></i>'
        for saying, end in zip(said, ends, strict=True)
    )
    return f'<div class="ribbon" aria-hidden="true">{pieces}</div><p class="note">steps {first} to {last}</p>'


def _proofs(run: Run, *, many: bool) -> str:
    def row(check: Check) -> str:
        mark = {"good": "✓", "note": "!", "bad": "✗", "none": "–"}[check.state]
        value = (
            {"good": "yes", "none": "not measured"}.get(check.state, "no")
            if check.value is None
            else number(check.value)
        )
        return f'<tr class="{check.state}"><td class="mark">{mark}</td><th scope="row">{escape(check.what)}</th><td>{value}</td></tr>'

    title = "Proofs and alarms" + (f": {run.name}" if many else "")
    return f'<section><h2>{escape(title)}</h2><table class="checks">{"".join(row(check) for check in checks(run))}</table></section>'


def _verdicts(runs: Sequence[Run]) -> str:
    rows = []
    for run in runs:
        whose = f"<td>{escape(run.name)}</td>" if len(runs) > 1 else ""
        for said in sayings(run):
            setting = f"<code>{escape(said.setting)}</code>" if said.setting else ""
            time = _when(said.unix_s) if said.unix_s else ""
            rows.append(
                f'<tr class="{said.state}">{whose}<td>{said.step}</td><td>{time}</td><td>{escape(said.sentence)} {setting}</td></tr>'
            )
    if not rows:
        return ""
    head = (
        "<th>run</th>" if len(runs) > 1 else ""
    ) + "<th>from step</th><th>time</th><th>verdict, and what to try</th>"
    return f'<section><h2>Verdicts</h2><div class="wide"><table class="rows"><tr>{head}</tr>{"".join(rows)}</table></div></section>'


def _compared(runs: Sequence[Run]) -> str:
    one, other = (flatten(run.config) for run in runs)
    keys = [key for key in different_keys(one, other) if key != "name"]
    both = [key for key in keys if key in one and key in other]
    lone = [key for key in keys if key not in both]
    head = "<tr><th>setting</th>" + "".join(f"<th>{escape(run.name)}</th>" for run in runs) + "</tr>"

    def table(keys: Sequence[str]) -> str:
        rows = "".join(
            f"<tr><th scope=row><code>{escape(key)}</code></th>"
            + "".join(f"<td>{escape(as_yaml(flat[key])) if key in flat else '(absent)'}</td>" for flat in (one, other))
            + "</tr>"
            for key in keys
        )
        return f'<div class="wide"><table class="rows">{head}{rows}</table></div>'

    main = table(both) if both else "<p>None.</p>"
    more = (
        f"<details><summary>{len(lone)} settings that only one of them has</summary>{table(lone)}</details>"
        if lone
        else ""
    )
    return f"<section><h2>Settings that differ</h2>{main}{more}</section>"


def _transcripts(run: Run) -> str:
    pages = sorted((run.folder / "transcripts").glob("step-*.html"))
    if not pages:
        return ""
    links = "".join(
        f'<li><a href="transcripts/{escape(page.name)}">step {int(page.stem.removeprefix("step-"))}</a></li>'
        for page in pages
    )
    return f'<section><h2>Transcripts: {escape(run.name)}</h2><p class="note">Sampled rollouts with every token\'s log-ratio and what the correction kept; beside this page in the run directory.</p><ul class="links">{links}</ul></section>'


def _settings(run: Run) -> str:
    if not run.config:
        return ""
    rows = "".join(
        f"<tr><th scope=row><code>{escape(key)}</code></th><td>{escape(as_yaml(value))}</td></tr>"
        for key, value in flatten(run.config).items()
    )
    again = f"moe-trm train {shlex.quote(str(run.folder / 'config.json'))} name={shlex.quote(run.name + '-again')}"
    return (
        f"<section><h2>Run it again: {escape(run.name)}</h2><pre><code>{escape(again)}</code></pre>"
        f'<details><summary>Every setting</summary><div class="wide"><table class="rows">{rows}</table></div></details></section>'
    )


def _everything(runs: Sequence[Run]) -> str:
    names = sorted({name for run in runs for name in run.metrics()})
    head = "<th>metric</th>" + "".join(f"<th>{escape(run.name)}</th>" for run in runs)
    rows = []
    for name in names:
        last = [run.series(name) for run in runs]
        cells = "".join(f"<td>{number(points[-1][1]) if points else ''}</td>" for points in last)
        rows.append(f"<tr><th scope=row><code>{escape(name)}</code></th>{cells}</tr>")
    return (
        "<section><h2>Every metric</h2><details><summary>Last value of each; all steps are in metrics.jsonl</summary>"
        f'<div class="wide"><table class="rows"><tr>{head}</tr>{"".join(rows)}</table></div></details></section>'
    )


def _when(unix_s: float) -> str:
    if not math.isfinite(unix_s):
        return ""
    return f"{datetime.fromtimestamp(unix_s, UTC):%Y-%m-%d %H:%M} UTC"
