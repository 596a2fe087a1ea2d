"""The report's table of settings that a resumption changed, from `settings.jsonl`."""

from __future__ import annotations

from html import escape

import orjson

from moe_trm.config.flat import as_yaml
from moe_trm.report.run import Run

FILE = "settings.jsonl"
"""One object (`step`, `key`, `old`, `new`) for each change."""


def changed_settings(run: Run, *, many: bool) -> str:
    """Every change and the step after which it holds; empty for a run that kept its settings."""
    path = run.folder / FILE
    lines = path.read_bytes().splitlines() if path.is_file() else []
    if not lines:
        return ""
    rows = "".join(
        f"<tr><td>{change['step']}</td><th scope=row><code>{escape(change['key'])}</code></th>"
        f"<td>{escape(as_yaml(change['old']))}</td><td>{escape(as_yaml(change['new']))}</td></tr>"
        for change in map(orjson.loads, lines)
    )
    title = "Settings changed on the way" + (f": {run.name}" if many else "")
    head = "<tr><th>after step</th><th>setting</th><th>before</th><th>then</th></tr>"
    return (
        f'<section><h2>{escape(title)}</h2><div class="wide"><table class="rows">{head}{rows}</table></div></section>'
    )
