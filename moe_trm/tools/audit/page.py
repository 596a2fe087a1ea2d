"""The page of an audit: one self-contained HTML document."""

from __future__ import annotations

from dataclasses import asdict
from html import escape

from moe_trm.observe.report.html import document, number, section, table, text
from moe_trm.tools.audit.audit_answer import AuditAnswer, listed
from moe_trm.tools.audit.examine import Audit

WORDS = {"ok": "fine", "warn": "look", "fail": "fault", "skip": "open"}


def render(audit: Audit) -> str:
    """The whole page, with every figure as JSON inside."""
    about = f"{audit.framework} · {audit.sample} of {audit.rows} rows · {audit.checkpoint}"
    body = [
        f'<header><h1>Audit of {escape(audit.source)}</h1><p class="about">{escape(about)}</p></header>',
        f'<section class="conclusion"><h2>Conclusion</h2>{conclusion(audit)}</section>',
        section(
            "Questions", table(("question", "answer", "evidence", "tokens", "what to change"), map(_row, audit.answers))
        ),
        section("Excluded", "".join(f"<p>{text(answer.excluded)}</p>" for answer in audit.answers if answer.excluded)),
        section("Figures", table(("question", "figure", "value"), _figures(audit))),
    ]
    return document(f"Audit of {audit.source}", "\n".join(body), {"runs": [], "audit": asdict(audit)})


def conclusion(audit: Audit) -> str:
    """The findings, in a paragraph each."""
    faults = [answer for answer in audit.answers if answer.status == "fail"]
    if not faults:
        words = (
            f"Nothing was found that makes results wrong. A fault in {audit.share:.0%} of the rows would have had a "
            f"row in this sample with {audit.power:.1%}."
        )
        return f"<p>{text(words)}</p>"
    return "".join(f"<p><b>{escape(answer.check.name)}</b>. {text(answer.sentence)}</p>" for answer in faults)


def _row(answer: AuditAnswer) -> str:
    cause = WORDS[answer.status] if answer.cause in ("none", "open") else f"{WORDS[answer.status]}: {answer.cause}"
    tokens = f"{answer.tokens} of {answer.judged}" if answer.judged else ""
    rows = f'<p class="note">{escape(listed(answer.rows))}</p>' if answer.rows else ""
    cells = (
        f'<th scope="row">{escape(answer.question)}</th>',
        f"<td>{escape(cause)}</td>",
        f"<td>{text(answer.sentence)}{rows}</td>",
        f"<td>{tokens}</td>",
        f"<td>{escape(answer.fix)}</td>",
    )
    return f"<tr>{''.join(cells)}</tr>"


def _figures(audit: Audit) -> list[str]:
    return [
        f'<tr><th scope="row">{escape(answer.question)}</th><td>{escape(name)}</td><td>{number(value)}</td></tr>'
        for answer in audit.answers
        for name, value in answer.figures.items()
    ]
