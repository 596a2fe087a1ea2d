"""The report's words: what state a run is in, what was proved, what the verdicts said, and the settings."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from typing import Any

from moe_trm.config.flat import as_yaml, different_keys, flatten
from moe_trm.observe.report.conclusion import configurations, differences, sentences
from moe_trm.observe.report.html import number, section, table, text
from moe_trm.observe.report.scale import short
from moe_trm.observe.report.summary import ProofCheck, Saying, State, checks, sayings
from moe_trm.run_folder.growth import fixed_texts_say, grows_because
from moe_trm.run_folder.run import Run
from moe_trm.run_folder.run_end import outcome

HEADS: Mapping[State, str] = {"good": "Nothing to change", "fair": "No fault found", "bad": "Look at this"}
COLOURS: Mapping[State, str] = {"good": "green", "fair": "yellow", "bad": "red"}
"""Of the strip of verdicts, as page.css has them."""


def state(run: Run, *, many: bool) -> str:
    """Progress of the run, and remarks on its files."""
    planned = f" of {run.planned_steps}" if run.planned_steps is not None else ""
    when = run.rows[-1].get("time/unix_s")
    written = f", last written {_when(when)}" if when else ""
    state, trouble = outcome(run.folder, complete=run.complete)
    model = run.config.get("model", {}).get("checkpoint")
    about = [f"step {run.last_step}{planned}{written}: {state}"]
    about += [f"model {model}"] if model else []
    about += [f"replay {run.config['replay']['mode']}"] if "mode" in run.config.get("replay", {}) else []
    about += _methods(run.config)
    notes = f'<pre class="warning failure">{escape(trouble)}</pre>' if trouble else ""
    notes += "".join(f'<p class="warning">{escape(note)}</p>' for note in run.notes)
    run_label = f"<strong>{escape(run.name)}</strong> " if many else ""
    return f'<p class="about">{run_label}{escape(" · ".join(about))}</p>{notes}'


def chosen(runs: Sequence[Run]) -> str:
    """The value of every `auto` and why, folded: once where all runs have it, else with the names of those that do."""
    runs_by_choice: dict[str, list[str]] = {}
    for run in runs:
        for choice in run.choices:
            runs_by_choice.setdefault(choice, []).append(run.name)
    if not runs_by_choice:
        return ""
    lines = [
        line if len(names) == len(runs) else f"{line} ({', '.join(names)})" for line, names in runs_by_choice.items()
    ]
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    many = "1 setting was" if len(runs_by_choice) == 1 else f"{len(runs_by_choice)} settings were"
    return f"<details><summary>{many} chosen by auto</summary><ul>{items}</ul></details>"


def _methods(config: Mapping[str, Any]) -> list[str]:
    """The corrections and the loss that the configuration names, functions of the user's own with their files."""
    correction = config.get("correction", {})
    preset = [correction["preset"]] if correction.get("preset") else []
    rules = [*preset, *(rule["name"] for rule in correction.get("rules", ()))]
    loss = config.get("loss", {}).get("name")
    return ([f"correction {', '.join(rules)}"] if rules else []) + ([f"loss {loss}"] if loss else [])


def verdict_now(run: Run, *, many: bool) -> str:
    """The latest verdict and its advice, and why the mismatch grew, where that was examined."""
    entries = sayings(run)
    if not entries:
        return ""
    latest = entries[-1]
    run_label = f"{escape(run.name)}: " if many else ""
    advice = f"<p>Try <code>{escape(latest.setting)}</code></p>" if latest.setting else ""
    growth = grows_because(run.folder) or fixed_texts_say(run)
    advice += f"<p>{escape(growth)}</p>" if growth else ""
    return (
        f'<section class="verdict {latest.state}" aria-label="Verdict"><h2>{run_label}{HEADS[latest.state]}</h2>'
        f"<p>{escape(run.rows[-1].get('verdict', latest.sentence))}</p>{advice}{_ribbon(run, entries)}</section>"
    )


def _ribbon(run: Run, entries: Sequence[Saying]) -> str:
    """The verdicts over the run as one strip."""
    first, last = entries[0].step, run.last_step
    if len(entries) < 2:
        return ""
    ends = [*(saying.step for saying in entries[1:]), last + 1]
    pieces = "".join(
        f'<i class="{saying.state}" style="flex-grow:{end - saying.step}" title="from step {saying.step}: '
        f'{escape(saying.sentence)}"></i>'
        for saying, end in zip(entries, ends, strict=True)
    )
    states = dict.fromkeys(saying.state for saying in entries)
    key = ", ".join(f"{COLOURS[state]}: {HEADS[state].lower()}" for state in COLOURS if state in states)
    return f'<div class="ribbon" aria-hidden="true">{pieces}</div><p class="note">steps {first} to {last}; {key}</p>'


def proofs(run: Run, *, many: bool) -> str:
    """Proofs and alarms at their worst step."""

    def row(check: ProofCheck) -> str:
        mark = {"good": "✓", "note": "!", "bad": "✗", "none": "–"}[check.state]
        value = (
            {"good": "yes", "none": "not measured"}.get(check.state, "no")
            if check.value is None
            else number(check.value)
        )
        return (
            f'<tr class="{check.state}"><td class="mark">{mark}</td><th scope="row">{escape(check.what)}</th>'
            f"<td>{value}</td></tr>"
        )

    rows = "".join(row(check) for check in checks(run))
    return section("Proofs and alarms", f'<table class="checks">{rows}</table>', run.name if many else "")


def verdicts(runs: Sequence[Run]) -> str:
    """Every change of verdict."""
    rows = []
    for run in runs:
        run_cell = f"<td>{escape(run.name)}</td>" if len(runs) > 1 else ""
        for saying in sayings(run):
            setting = f"<code>{escape(saying.setting)}</code>" if saying.setting else ""
            time = _when(saying.unix_s) if saying.unix_s else ""
            rows.append(
                f'<tr class="{saying.state}">{run_cell}<td>{saying.step}</td><td>{time}</td>'
                f"<td>{escape(saying.sentence)} {setting}</td></tr>"
            )
    head = ("run",) if len(runs) > 1 else ()
    return section("Verdicts", table((*head, "from step", "time", "verdict, and what to try"), rows)) if rows else ""


def concluded(runs: Sequence[Run]) -> str:
    """The differences of what the runs measured, and their certainty."""
    paragraphs = "".join(f"<p>{text(sentence)}</p>" for sentence in sentences(runs))
    all_differences = differences(runs)
    if not all_differences:
        return f'<section class="conclusion"><h2>Conclusion</h2>{paragraphs}</section>'
    arms = configurations(runs)
    rows = []
    for measure in dict.fromkeys(difference.measure for difference in all_differences):
        by_arm = {difference.other.label: difference for difference in all_differences if difference.measure is measure}
        first = next(iter(by_arm.values()))
        cells = [
            f"<td>{short(by_arm[arm.label].other_value)}<br>{escape(by_arm[arm.label].difference_in_words)}</td>"
            for arm in arms[1:]
        ]
        name = f"{escape(measure.words)}<br>{escape(first.when.lower())}"
        rows.append(f"<tr><th scope=row>{name}</th><td>{short(first.first_value)}</td>{''.join(cells)}</tr>")
    head = "".join(f"<th>{escape(arm.label)}</th>" for arm in arms)
    note = (
        f"Under each figure its difference from {arms[0].label}. What every step measures is the mean over the last "
        "common steps; evaluations are those of the last common step. Intervals are over seeds."
    )
    return (
        f'<section class="conclusion"><h2>Conclusion</h2>{paragraphs}<div class="wide"><table class="rows matrix">'
        f"<tr><th>figure</th>{head}</tr>{''.join(rows)}</table></div>"
        f'<p class="note">{escape(note)}</p></section>'
    )


def compared(runs: Sequence[Run]) -> str:
    """The settings that are not the same in all runs."""
    flat_configs = [flatten(run.config) for run in runs]
    differing = dict.fromkeys(
        key for flat_config in flat_configs[1:] for key in different_keys(flat_configs[0], flat_config)
    )
    keys = [key for key in differing if key != "name"]
    common = [key for key in keys if all(key in flat for flat in flat_configs)]
    lone = [key for key in keys if key not in common]

    def listed(keys: Sequence[str]) -> str:
        rows = (
            f"<tr><th scope=row><code>{escape(key)}</code></th>"
            + "".join(f"<td>{text(as_yaml(flat[key])) if key in flat else '(absent)'}</td>" for flat in flat_configs)
            + "</tr>"
            for key in keys
        )
        return table(("setting", *(run.name for run in runs)), rows)

    main = listed(common) if common else "<p>None.</p>"
    more = (
        f"<details><summary>{len(lone)} settings that only some of them have</summary>{listed(lone)}</details>"
        if lone
        else ""
    )
    return section("Settings that differ", main + more)


def transcripts(run: Run) -> str:
    """Links to the transcripts beside the page."""
    pages = sorted((run.folder / "transcripts").glob("step-*.html"))
    if not pages:
        return ""
    links = "".join(
        f'<li><a href="transcripts/{escape(page.name)}">step {int(page.stem.removeprefix("step-"))}</a></li>'
        for page in pages
    )
    note = "Sampled rollouts with every token's log-ratio and what the correction kept; beside this page."
    return section("Transcripts", f'<p class="note">{note}</p><ul class="links">{links}</ul>', run.name)


def settings(run: Run) -> str:
    """The command that repeats the run, and every setting."""
    if not run.config:
        return ""
    rows = (
        f"<tr><th scope=row><code>{escape(key)}</code></th><td>{text(as_yaml(value))}</td></tr>"
        for key, value in flatten(run.config).items()
    )
    again = f"moe-trm train {shlex.quote(str(run.folder / 'config.json'))} name={shlex.quote(run.name + '-again')}"
    all_settings = f"<details><summary>Every setting</summary>{table((), rows)}</details>"
    return section("Run it again", f"<pre><code>{escape(again)}</code></pre>{all_settings}", run.name)


def everything(runs: Sequence[Run]) -> str:
    """The last value of every metric."""
    names = sorted({name for run in runs for name in run.metrics()})
    rows = []
    for name in names:
        last = [run.series(name) for run in runs]
        cells = "".join(f"<td>{number(points[-1][1]) if points else ''}</td>" for points in last)
        rows.append(f"<tr><th scope=row><code>{escape(name)}</code></th>{cells}</tr>")
    last_values = "<summary>Last value of each; all steps are in metrics.jsonl</summary>"
    shown = table(("metric", *(run.name for run in runs)), rows)
    return section("Every metric", f"<details>{last_values}{shown}</details>")


def _when(unix_s: float) -> str:
    if not math.isfinite(unix_s):
        return ""
    return f"{datetime.fromtimestamp(unix_s, UTC):%Y-%m-%d %H:%M} UTC"
