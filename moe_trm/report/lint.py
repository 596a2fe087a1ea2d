"""The report's section on anti-patterns: those that the settings or the metrics of a run show."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape

from pydantic import ValidationError

from moe_trm.config.anti_patterns import AntiPattern, found
from moe_trm.config.schema import Config
from moe_trm.report.run import Run


def anti_patterns(run: Run) -> list[AntiPattern] | None:
    """The rows of the table that `run` shows; None where its settings cannot be read by this version."""
    try:
        config = Config.model_validate_json(json.dumps(run.config), strict=True)
    except ValidationError:
        return None
    history: list[Mapping[str, float]] = [
        {name: float(value) for name, value in row.items() if isinstance(value, (int, float))} for row in run.rows
    ]
    return found(config, history)


def section(run: Run, *, many: bool) -> str:
    """Each anti-pattern with its reason and advice; empty where there is none."""
    rows = anti_patterns(run)
    if not run.config or rows == []:
        return ""
    title = "Anti-patterns" + (f": {run.name}" if many else "")
    if rows is None:
        return (
            f"<section><h2>{escape(title)}</h2><p>Not looked for: this version does not know all settings of the "
            "run.</p></section>"
        )
    lines = "".join(
        f'<tr class="note"><th scope="row">{escape(row.name)}</th><td>{escape(row.reason)}</td>'
        f"<td><code>{escape(row.advice)}</code></td></tr>"
        for row in rows
    )
    return (
        f'<section><h2>{escape(title)}</h2><div class="wide"><table class="rows"><tr><th>name</th><th>why</th>'
        f"<th>try</th></tr>{lines}</table></div></section>"
    )
