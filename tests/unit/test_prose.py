"""Few sentences of the README and of the pages in docs are long, and their lines fit on a screen."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from statistics import quantiles

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = ["README.md", *sorted(str(page.relative_to(REPOSITORY)) for page in (REPOSITORY / "docs").glob("*.md"))]
WIDEST = 120
LARGEST_P90 = 28
"""Words of all but a tenth of the sentences, at the most."""

NOT_PROSE = re.compile(r"\s*(?:\||#|!\[|<|---)")
LIST_ITEM = re.compile(r"^\s*(?:[-*]|\d+\.) ")


def paragraphs(text: str) -> Iterator[str]:
    """Prose by paragraph and list item, without code blocks, tables, headings and pictures."""
    lines: list[str] = []
    for line in [*re.sub(r"```.*?```", "\n", text, flags=re.DOTALL).splitlines(), ""]:
        code = line.startswith("    ") and not lines
        ends = not line.strip() or code or NOT_PROSE.match(line)
        if lines and (ends or LIST_ITEM.match(line)):
            yield " ".join(lines)
            lines = []
        if not ends:
            lines.append(LIST_ITEM.sub("", line).strip())


def sentence_lengths(text: str) -> list[int]:
    """Words of each sentence. A piece of inline code is one word, and so is a number; a link counts by its text."""
    lengths = []
    for paragraph in paragraphs(text):
        words = re.sub(r"`[^`]*`", "code", paragraph)
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", words)
        for sentence in re.split(r"(?<=[.!?])[*)\"']*\s+", words):
            if count := len(re.findall(r"\S*\w\S*", sentence)):
                lengths.append(count)
    return lengths


def test_sentences_are_counted() -> None:
    text = (
        "# No\n\nOne two `x = 1` top-4. Five [six\nseven](a.md).\n\n| no |\n\n"
        "- eight\n- nine ten\n\n```sh\nno no\n```\n"
    )
    assert sentence_lengths(text) == [4, 3, 1, 2]


def text_of(page: str) -> str:
    return (REPOSITORY / page).read_text(encoding="utf-8")


def test_few_sentences_are_long() -> None:
    p90 = {page: quantiles(sentence_lengths(text_of(page)), n=10, method="inclusive")[-1] for page in PAGES}
    assert not {page: length for page, length in p90.items() if length > LARGEST_P90}


def test_lines_fit_on_a_screen() -> None:
    """Rows of tables cannot be broken and may be longer."""
    lines = [(page, number, line) for page in PAGES for number, line in enumerate(text_of(page).splitlines(), 1)]
    assert not [f"{page}:{number}" for page, number, line in lines if len(line) > WIDEST and not line.startswith("|")]


def test_pages_open_with_a_sentence() -> None:
    """Below its title a page says what it is for, before any table, code or further heading."""
    for page in PAGES:
        title, blank, first = text_of(page).splitlines()[:3]
        assert title.startswith("# "), page
        assert not blank, page
        assert first, page
        assert not NOT_PROSE.match(first), page
        assert not LIST_ITEM.match(first), page
