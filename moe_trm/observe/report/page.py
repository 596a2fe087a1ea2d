"""The report page: runs in, one self-contained HTML document out."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from moe_trm.observe.report import words
from moe_trm.observe.report.cards import Cards
from moe_trm.observe.report.html import document
from moe_trm.observe.report.run_tables import changed_settings, linted, lost_servers
from moe_trm.run_folder.run import Run


def render(runs: Sequence[Run]) -> str:
    """The report of one run, or of several side by side."""
    cards = Cards(runs)
    title = " and ".join(run.name for run in runs[:3]) + (f" and {len(runs) - 3} more" if len(runs) > 3 else "")
    states = "".join(words.state(run, many=len(runs) > 1) for run in runs)
    body = [
        f"<header><h1>{escape(title)}</h1>{states}{words.chosen(runs)}</header>",
        words.concluded(runs) if len(runs) > 1 else "",
        words.compared(runs) if len(runs) > 1 else "",
        *(words.verdict_now(run, many=len(runs) > 1) for run in runs),
        *(lost_servers(run, many=len(runs) > 1) for run in runs),
        *(changed_settings(run, many=len(runs) > 1) for run in runs),
        cards.tiles(),
        *(words.proofs(run, many=len(runs) > 1) for run in runs),
        *(linted(run, many=len(runs) > 1) for run in runs),
        *cards.sections(),
        words.verdicts(runs),
        *(words.transcripts(run) for run in runs),
        *(words.settings(run) for run in runs),
        words.everything(runs),
    ]
    return document(title, "\n".join(part for part in body if part), cards.data())
