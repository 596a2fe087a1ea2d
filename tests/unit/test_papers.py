"""The page of papers says what the table says, and the table what the code can do."""

from __future__ import annotations

import re
from functools import cache
from itertools import pairwise

import msgspec
import pytest

from docs.make import paper_table, papers_page
from docs.make.paper_table import FOLDER, PARTS, REPOSITORY, Method, Paper, parse
from moe_trm import corrections, losses
from moe_trm.config import Resolved, resolve
from moe_trm.methods.advantages import ADVANTAGES
from moe_trm.step.recipe import recipe

ROWS = paper_table.rows()
PAPERS = [paper for part in paper_table.read() for paper in part.paper]
RUN = [(paper, method) for paper, method in ROWS if method.run is not None]
FIGURES = [method for _, method in ROWS if method.figure]
NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?:e-?\d+)?(?![\w.]*\w)")
LONGEST_CLAIM = 32
ON_PURPOSE = "the rollout is a behaviour policy of its own"
"""The words of a launch on rounded rollouts, whatever else is set."""


def named(method: Method) -> str:
    return method.name


@cache
def resolved(method: Method) -> Resolved:
    return resolve(REPOSITORY / method.base, method.run or ())


def test_the_page_is_up_to_date() -> None:
    said = papers_page.PAGE.read_text(encoding="utf-8")
    assert said == papers_page.page(), "run `python -m docs.make.papers_page`"


def test_every_file_of_the_table_is_a_part_of_the_page() -> None:
    assert {path.stem for path in FOLDER.glob("*.toml")} == set(PARTS)


def test_names_and_papers_are_in_the_table_once() -> None:
    ids = [paper.arxiv for paper in PAPERS if paper.arxiv]
    for values in ([method.name for _, method in ROWS], [paper.title for paper in PAPERS], ids):
        assert sorted(values) == sorted(set(values))


def has_address(paper: Paper) -> bool:
    """True if the paper's arXiv id or link is well formed."""
    if not paper.arxiv:
        return re.fullmatch(r"https?://[^\s|()]+", paper.link) is not None
    digits = re.fullmatch(r"(\d\d)(\d\d)\.\d{5}", paper.arxiv)
    return digits is not None and 15 <= int(digits[1]) <= 26 and 1 <= int(digits[2]) <= 12


def test_addresses_are_well_formed() -> None:
    assert not [paper.title for paper in PAPERS if not has_address(paper)]


def test_rows_are_plain_and_short() -> None:
    for _, method in ROWS:
        assert re.fullmatch(r"[A-Z\d][^|]*[^.]\.", method.claim), method.name
        assert len(method.claim.split()) <= LONGEST_CLAIM, method.name
        for text in (method.note, method.reason, method.figure):
            assert not re.search(r"[|\n]", text), method.name
        assert not (method.note or method.reason) or (method.note or method.reason).endswith("."), method.name


@pytest.mark.parametrize("method", [method for _, method in RUN], ids=named)
def test_a_configuration_loads_with_its_settings_and_all_of_them_count(method: Method) -> None:
    assert not [warning for warning in resolved(method).warnings if ON_PURPOSE not in warning]
    recipe(resolved(method).config)


@pytest.mark.parametrize("method", FIGURES, ids=named)
def test_the_numbers_of_a_figure_stand_where_its_link_leads(method: Method) -> None:
    path, _, anchor = method.at.partition("#")
    lines = (REPOSITORY / path).read_text(encoding="utf-8").splitlines()
    headings = [number for number, line in enumerate(lines) if re.match(r"#+ ", line)] + [len(lines)]
    found = [
        "\n".join(lines[start:end])
        for start, end in pairwise(headings)
        if re.sub(r"[^a-z0-9 -]", "", lines[start].lstrip("# ").lower()).replace(" ", "-") == anchor
    ]
    assert len(found) == 1, method.at
    there = set(NUMBER.findall(found[0]))
    assert set(NUMBER.findall(method.figure)) <= there


def test_every_method_that_can_be_chosen_is_in_a_row() -> None:
    text = "\n".join(f"{papers_page.command(method)} {method.note}" for _, method in RUN)
    missing = [
        name
        for name in (*corrections.names(), *losses.names(), *ADVANTAGES)
        if not re.search(rf"(?<![\w]){name}(?![\w])", text)
    ]
    assert not missing


def test_a_source_that_the_code_names_has_a_row_with_that_code() -> None:
    """Rules and losses by the arXiv ids in their docstrings: a row of that paper runs them, or its note names them."""
    used: dict[str, set[str]] = {}
    for paper, method in RUN:
        made = recipe(resolved(method).config)
        rules = {bound.rule.name for bound in made.rules} | {item.rule.name for item in made.uncalibrated}
        used.setdefault(paper.arxiv, set()).update(rules, {made.loss.loss.name}, re.findall(r"`(\w+)`", method.note))
    texts = {name: str(corrections.get(name).__doc__) for name in corrections.names()}
    texts |= {name: str(losses.get(name).__doc__) for name in losses.names()}
    for name, text in texts.items():
        for arxiv in re.findall(r"\b\d{4}\.\d{5}\b", text.partition("Source:")[2]):
            assert name in used.get(arxiv, ()), f"{name} of {arxiv}"


HEAD = "title = 'A'\nabout = 'B.'\n[[paper]]\ntitle = 'C'\narxiv = '2501.00001'\n"
ROW = HEAD + "[[paper.method]]\nname = 'D'\nclaim = 'E.'\n"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (ROW, "exactly one of `run` and `reason`"),
        (ROW + "run = []\nreason = 'F.'", "exactly one of `run` and `reason`"),
        (ROW + "reason = 'F.'\nnote = 'G.'", "belong to a `run`"),
        (ROW + "run = []\nfigure = '3'", "needs the place"),
        (ROW + "runs = []", "unknown field"),
        (HEAD.replace("arxiv", "arXiv") + "method = []", "unknown field"),
        (HEAD + "method = []", "no method"),
        (HEAD + "link = 'https://a.b'\nmethod = []", "exactly one of `arxiv` and `link`"),
    ],
)  # fmt: skip
def test_a_row_that_is_not_whole_is_refused(text: str, reason: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=reason):
        parse(text)
