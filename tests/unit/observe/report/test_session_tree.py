"""The tree of a session in a transcript: every answer where it belongs, and what of it is trained."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_trm.batch.train_rows import train_rows
from moe_trm.config.schema.agent import AgentRows
from moe_trm.observe.report.session_tree import CUTS, leaves, places, session_tree, tree_lines, words
from moe_trm.observe.report.session_turns import session_turns
from moe_trm.observe.transcripts import Transcripts
from moe_trm.rollout.agents.tree import Cut
from moe_trm.types import RolloutRecord, SessionTurn
from tests.unit.observe.made_transcripts import Letters, judged
from tests.unit.observe.report.page_reader import PageReader
from tests.unit.rollout.agents.made_sessions import rows_of, sample_of, tree_of

FORKED = [-1, 0, 1, 0, 1, -1]


class Drawn(HTMLParser):
    """Groups, circles, links and titles of a drawing."""

    def __init__(self, drawing: str) -> None:
        super().__init__()
        self.groups: list[dict[str, str]] = []
        self.circles: list[tuple[float, float]] = []
        self.links: list[dict[str, str]] = []
        self.titles: list[str] = []
        self._title = False
        self.feed(drawing)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = {name: value or "" for name, value in attrs}
        self._title = tag == "title"
        if tag == "g":
            self.groups.append(known)
        if tag == "circle":
            self.circles.append((float(known["cx"]), float(known["cy"])))
        if tag == "path":
            self.links.append(known)

    def handle_data(self, data: str) -> None:
        if self._title:
            self.titles.append(data)
            self._title = False


@st.composite
def shapes(draw: st.DrawFn) -> list[SessionTurn]:
    count = draw(st.integers(2, 12))
    return [
        SessionTurn(
            draw(st.integers(-1, number - 1)), number, number + 1, draw(st.integers(-1, 2)), draw(st.booleans())
        )
        for number in range(count)
    ]


@given(turns=shapes())
def test_every_answer_has_a_place_of_its_own_behind_its_parent(turns: list[SessionTurn]) -> None:
    columns, lanes = places(turns)
    assert len(set(zip(columns, lanes, strict=True))) == len(turns)
    for place, turn in enumerate(turns):
        assert columns[place] == (columns[turn.parent] + 1 if turn.parent >= 0 else 0)
        assert turn.parent < 0 or lanes[place] >= lanes[turn.parent]
    assert max(lanes) + 1 == len(leaves(turns))
    drawn = Drawn(session_tree(turns, 1, 0.5))
    assert [int(group["data-answer"]) for group in drawn.groups] == list(range(len(turns)))
    for group, link, turn in zip(drawn.groups, drawn.links, turns, strict=True):
        assert (int(group["data-row"]), int(group["data-parent"])) == (turn.row, turn.parent)
        assert group["class"] == ("own" if turn.row == 1 else "other" if turn.row >= 0 else "out")
        assert link["class"] == ("link cut" if turn.cut else "link")
    for (x, y), link in zip(drawn.circles, drawn.links, strict=True):
        assert link["d"].endswith(f" {x:g},{y:g}"), "a line ends at its answer"
        begin = re.match(r"M([\d.]+),([\d.]+)C", link["d"])
        assert begin is not None
        assert float(begin[1]) < x


def test_the_drawing_of_a_session_by_hand() -> None:
    """0 - 1 - 2, a branch 3 at 0 and 4 at 1, and 5 from the root, which the template cut."""
    sample = rows_of(tree_of(FORKED, cut=[5], stale=False), "last").sample
    columns, lanes = places(sample.session)
    assert columns == [0, 1, 2, 1, 2, 0]
    assert lanes == [0, 0, 0, 2, 1, 3]
    drawn = Drawn(session_tree(sample.session, 0, 1.0))
    assert [group["class"] for group in drawn.groups] == ["out"] * 5 + ["own"]
    assert drawn.titles[0] == "prompt"
    assert drawn.titles[1] == "answer 0: 2 tokens behind 2 given ones, not trained (not_chosen)"
    assert drawn.titles[6] == (
        "answer 5: 4 tokens behind 2 given ones, row 0, another branch from the prompt, "
        "cut (the chat template changes earlier text)"
    )
    assert tree_lines(sample.session, 0)[2:] == [
        "    - answer 2: 4 tokens behind 2 given ones, not trained (not_chosen)",
        "  - answer 3: 2 tokens behind 2 given ones, not trained (not_chosen), another branch behind answer 0",
        "    - answer 4: 3 tokens behind 2 given ones, not trained (not_chosen), another branch behind answer 1",
        f"* {drawn.titles[6]}",
    ]
    assert words([SessionTurn(-1, 3, 4, reason="version_span")], 0).endswith("not trained (version_span)")


def test_the_interface_and_the_reason_of_a_cut_are_shown() -> None:
    turns = [
        SessionTurn(-1, 3, 4, 0, dialect="messages"),
        SessionTurn(-1, 5, 2, 1, cut=True, cut_by="thinking_dropped", dialect="messages"),
        SessionTurn(1, 5, 2, 1, dialect="chat"),
        SessionTurn(2, 5, 2, 1, cut=True),
    ]
    drawing = session_tree(turns, 1, 1.0)
    drawn = Drawn(drawing)
    assert [group["data-dialect"] for group in drawn.groups] == ["messages", "messages", "chat", ""]
    assert "Session of 4 answers in 2 branches over messages and chat" in drawing
    assert words(turns, 1) == (
        "2 tokens behind 5 given ones, row 1, another branch from the prompt, cut (the client left thinking out), "
        "over messages"
    )
    assert words(turns, 3).endswith("row 1, cut")
    assert CUTS.keys() == {*get_args(Cut)} - {""}


def test_one_answer_needs_no_drawing() -> None:
    assert session_tree((), 0, 1.0) == session_tree((SessionTurn(-1, 3, 4, 0),), 0, 1.0) == ""


def rewarded(record: RolloutRecord) -> RolloutRecord:
    return replace(record, reward=0.75, further=tuple(map(rewarded, record.further)))


def page_of(folder: Path, samples: Sequence[RolloutRecord], rollouts: int) -> Path:
    sink = Transcripts(folder, "nowhere", every=10, rollouts=rollouts, decoder=Letters())
    rows = [row for sample in samples for row in train_rows(rewarded(sample))]
    rows = [replace(row, record=replace(row.record, routes=None)) for row in rows]
    _, evidence, correction = judged(rows)
    sink.judged(rows, evidence, correction)
    sink.write(1, {})
    return folder / "transcripts" / "step-000001"


def test_a_transcript_shows_the_tree_with_its_own_row(tmp_path: Path) -> None:
    """One row was rejected for its routes; the other rows of the session are transcripts of their own."""
    sample = rows_of(tree_of(FORKED, bad=[4], stale=False), "trajectory", sample_id=3).sample
    path = page_of(tmp_path, [sample], rollouts=9)
    html = path.with_suffix(".html").read_text()
    page = PageReader(html)
    assert [told["row"] for told in page.data["rollouts"]] == [0, 1, 2]
    assert {told["sample_id"] for told in page.data["rollouts"]} == {3}
    figures = re.findall(r'<figure class="session">(.*?)</figure>', html, re.S)
    assert len(figures) == 3
    for row, (figure, told) in enumerate(zip(figures, page.data["rollouts"], strict=True)):
        drawn = Drawn(figure)
        assert [turn["row"] for turn in told["session"]] == [1, 1, 1, 2, -1, 0]
        own = {int(group["data-answer"]) for group in drawn.groups if group["class"] == "own"}
        assert own == {answer for answer, turn in enumerate(told["session"]) if turn["row"] == row}
        assert [int(group["data-answer"]) for group in drawn.groups if group["class"] == "out"] == [4]
        assert 'value="0.75"' in figure
        assert sum(kind == "sampled" for kind in told["kinds"]) == sum(
            turn["sampled"] for turn in told["session"] if turn["row"] == row
        )
    assert "Sample 3, row 1, prompt p" in html
    assert "not trained (version_span)" in html
    text = path.with_suffix(".txt").read_text()
    assert "=== sample 3, row 2 of prompt p: reward 0.75" in text
    assert text.count("* answer 5: 4 tokens behind 2 given ones, row 0") == 1


class Turns(HTMLParser):
    """Texts of the lists of answers: for each list, what was given and answered, by the answer."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.lists: list[dict[int, dict[str, str]]] = []
        self._answer, self._block = -1, ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = {name: value or "" for name, value in attrs}
        if tag == "details" and known.get("class") == "turns":
            self.lists.append({})
        elif tag == "li" and self.lists and "data-answer" in known:
            self._answer, self._block = int(known["data-answer"]), "words"
            self.lists[-1][self._answer] = {}
        elif tag == "pre" and self.lists:
            self._block = known["class"]

    def handle_endtag(self, tag: str) -> None:
        if tag in ("pre", "li"):
            self._block = ""

    def handle_data(self, data: str) -> None:
        if self._block:
            blocks = self.lists[-1][self._answer]
            blocks[self._block] = blocks.get(self._block, "") + data


@pytest.mark.parametrize("how", ["last", "trajectory", "turns"])
def test_every_answer_of_a_row_is_there_as_text(tmp_path: Path, how: AgentRows) -> None:
    """Joined they are the text of the row. Ids 5 to 7 are a line break, `<` and nothing."""
    tree = tree_of(FORKED, cut=[5], stale=False)
    sample = rows_of(tree, how, sample_id=3).sample
    html = page_of(tmp_path, [sample], rollouts=9).with_suffix(".html").read_text()
    lists = Turns(html).lists
    assert len(lists) == len(sample.rows)
    for answers, record in zip(lists, sample.rows, strict=True):
        assert list(answers) == list(range(len(FORKED))), "also the answers of other branches"
        shown = [blocks["given"] + blocks["answer"] for blocks in answers.values() if "given" in blocks]
        assert "".join(shown) == "".join(Letters().pieces(record.tokens.tolist()))
        for place, blocks in answers.items():
            assert blocks["words"] == words(record.session, place)
            if "answer" in blocks:
                assert blocks["answer"] == "".join(Letters().pieces(tree.nodes[place].turn.tokens.tolist()))


def test_a_sample_without_a_session_has_no_list_of_answers() -> None:
    record = rows_of(tree_of([-1], stale=False), "last").sample
    assert session_turns(replace(record, session=()), "abcd") == ""
    assert Turns(session_turns(record, ["a", "<script>", '"', "&"])).lists == [
        {0: {"words": words(record.session, 0), "given": "a<script>", "answer": '"&'}}
    ]


def test_text_of_a_record_cannot_break_out_of_the_drawing() -> None:
    drawing = session_tree((SessionTurn(-1, 1, 1, reason="<script>"), SessionTurn(0, 1, 1, reason="<b>")), 0, None)
    assert "<script>" not in drawing
    assert "<b>" not in drawing


@pytest.mark.parametrize("rollouts", [1, 2])
def test_different_prompts_still_come_first(tmp_path: Path, rollouts: int) -> None:
    samples = [sample_of(FORKED, "turns", sample_id=number, group_id=number) for number in range(2)]
    path = page_of(tmp_path, samples, rollouts)
    told = PageReader(path.with_suffix(".html").read_text()).data["rollouts"]
    assert [(one["sample_id"], one["row"]) for one in told] == [(0, 0), (1, 0)][:rollouts]
