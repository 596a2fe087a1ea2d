"""The tree of an agent's session as a drawing and as lines of text: answers, branches, and what of them is trained.

A mark is one answer. From left to right stands how many answers came before it in its branch, from top to bottom one
branch after the other. Every mark names its answer (`data-answer`) and its row (`data-row`), so that a test can map it
back to the record.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from moe_trm.observe.report.html import number
from moe_trm.types import SessionTurn

COLUMN, LANE, EDGE, RADIUS = 74.0, 34.0, 16.0, 7.0
LABEL = 170.0
"""Room for the words behind the end of a branch."""
CUTS = {
    "template": "the chat template changes earlier text",
    "stop_text": "text behind a stop text was sampled",
    "thinking_dropped": "the client left thinking out",
    "thinking_edited": "the client changed thinking",
}
"""Reasons of cuts in words."""


def session_tree(turns: Sequence[SessionTurn], row: int, reward: float | None) -> str:
    """A figure of the tree of answers in order, in which `row`'s stand out; empty for one answer at most."""
    if len(turns) < 2:
        return ""
    columns, lanes = places(turns)
    width = EDGE + COLUMN * (max(columns) + 1) + LABEL
    height = 2 * EDGE + LANE * max(lanes) + 12
    ends = leaves(turns)
    links = "".join(_link(turn, columns, lanes, place) for place, turn in enumerate(turns))
    marks = "".join(_mark(turns, place, row, columns, lanes, end=place in ends) for place in range(len(turns)))
    root = f'<rect class="root" x="{EDGE - 5:g}" y="{EDGE - 5:g}" width="10" height="10"><title>prompt</title></rect>'
    summary = f"{len(turns)} answers in {len(ends)} branches{_over(turns)}"
    return (
        f'<figure class="session"><div class="wide"><svg viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" role="img" aria-label="Session of {escape(summary)}">{links}{root}{marks}</svg></div>'
        f'<figcaption class="note">Session of {summary}, reward {number(reward)}. Filled: trained in this row. Ring: '
        "in another row. Dashed ring: in none. Dashed line: a cut, where the ids before could not be continued."
        "</figcaption></figure>"
    )


def tree_lines(turns: Sequence[SessionTurn], row: int) -> list[str]:
    """One line for each answer, indented by its place in its branch; `*` marks `row`'s answers."""
    columns, _ = places(turns)
    return [
        f"{'  ' * columns[place]}{'*' if turn.row == row else '-'} answer {place}: {words(turns, place)}"
        for place, turn in enumerate(turns)
    ]


def words(turns: Sequence[SessionTurn], place: int) -> str:
    """One answer in words: its tokens, the row that trains it, where its branch comes from, and its interface."""
    turn = turns[place]
    trained = f"row {turn.row}" if turn.row >= 0 else f"not trained ({turn.reason})"
    parts = [f"{turn.sampled} tokens behind {turn.added} given ones", trained]
    if any(earlier.parent == turn.parent for earlier in turns[:place]):
        parts.append("another branch " + (f"behind answer {turn.parent}" if turn.parent >= 0 else "from the prompt"))
    if turn.cut:
        parts.append(f"cut ({CUTS.get(turn.cut_by, turn.cut_by)})" if turn.cut_by else "cut")
    if turn.dialect:
        parts.append(f"over {turn.dialect}")
    return ", ".join(parts)


def _over(turns: Sequence[SessionTurn]) -> str:
    """The interfaces of a session, in the order in which they came."""
    dialects = [*dict.fromkeys(turn.dialect for turn in turns if turn.dialect)]
    return f" over {' and '.join(dialects)}" if dialects else ""


def places(turns: Sequence[SessionTurn]) -> tuple[list[int], list[int]]:
    """Column and lane of each answer; an answer is in the lane of the oldest one behind it."""
    columns: list[int] = []
    for turn in turns:
        columns.append(0 if turn.parent < 0 else columns[turn.parent] + 1)
    behind: dict[int, list[int]] = {}
    for place, turn in enumerate(turns):
        behind.setdefault(turn.parent, []).append(place)
    lanes, free = [0] * len(turns), 0
    waiting = behind[-1][::-1]
    while waiting:
        place = waiting.pop()
        lanes[place] = free
        free += place not in behind
        waiting += behind.get(place, [])[::-1]
    return columns, lanes


def leaves(turns: Sequence[SessionTurn]) -> set[int]:
    """Answers that nothing continues."""
    return {*range(len(turns))} - {turn.parent for turn in turns}


def _at(column: int, lane: int) -> tuple[float, float]:
    return EDGE + COLUMN * (column + 1), EDGE + LANE * lane


def _link(turn: SessionTurn, columns: Sequence[int], lanes: Sequence[int], place: int) -> str:
    x, y = _at(columns[place], lanes[place])
    from_x, from_y = (EDGE, EDGE) if turn.parent < 0 else _at(columns[turn.parent], lanes[turn.parent])
    half = from_x + COLUMN / 2
    kind = "link cut" if turn.cut else "link"
    return f'<path class="{kind}" d="M{from_x:g},{from_y:g}C{half:g},{from_y:g} {half:g},{y:g} {x:g},{y:g}"/>'


def _mark(
    turns: Sequence[SessionTurn], place: int, row: int, columns: Sequence[int], lanes: Sequence[int], *, end: bool
) -> str:
    turn, label = turns[place], words(turns, place)
    x, y = _at(columns[place], lanes[place])
    kind = "own" if turn.row == row else "other" if turn.row >= 0 else "out"
    behind = f"row {turn.row}" if turn.row >= 0 else turn.reason
    text = f'<text x="{x + RADIUS + 6:g}" y="{y + 4:g}">{escape(behind)}</text>' if end else ""
    return (
        f'<g class="{kind}" data-answer="{place}" data-row="{turn.row}" data-parent="{turn.parent}" '
        f'data-dialect="{escape(turn.dialect)}">'
        f'<circle cx="{x:g}" cy="{y:g}" r="{RADIUS:g}"><title>answer {place}: {escape(label)}</title></circle>'
        f'<text class="count" x="{x:g}" y="{y + RADIUS + 11:g}" text-anchor="middle">{turn.sampled}</text>{text}</g>'
    )
