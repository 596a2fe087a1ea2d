"""The answers of an agent's session as a list: where each comes from, and the text of those in this row's branch."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from moe_trm.observe.report.session_tree import words
from moe_trm.types import RolloutRecord


def session_turns(record: RolloutRecord, pieces: Sequence[str]) -> str:
    """A list of all answers of the session of `record`, closed until it is opened; empty without a session.

    `pieces` are the texts of the record's tokens. They are the branch that ends in its last answer, so another branch
    has its texts in the rows that train it.
    """
    texts: dict[int, tuple[str, str]] = {}
    start = 0
    for place in _branch(record):
        turn = record.session[place]
        middle, end = start + turn.added, start + turn.added + turn.sampled
        texts[place] = "".join(pieces[start:middle]), "".join(pieces[middle:end])
        start = end
    if not texts:
        return ""
    items = "".join(_item(record, place, texts.get(place)) for place in range(len(record.session)))
    return f'<details class="turns"><summary>Answers as text</summary><ol start="0">{items}</ol></details>'


def _branch(record: RolloutRecord) -> list[int]:
    """The answers of the record in their order, those that are its context included."""
    turns, branch = record.session, []
    place = max((place for place, turn in enumerate(turns) if turn.row == record.row), default=-1)
    while place >= 0:
        branch.append(place)
        place = turns[place].parent
    return branch[::-1]


def _item(record: RolloutRecord, place: int, texts: tuple[str, str] | None) -> str:
    blocks = ""
    if texts is not None:
        blocks = f'<pre class="given">{escape(texts[0])}</pre><pre class="answer">{escape(texts[1])}</pre>'
    return f'<li data-answer="{place}">{escape(words(record.session, place))}{blocks}</li>'
