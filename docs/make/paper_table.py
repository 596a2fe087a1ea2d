"""The table of papers behind docs/papers.md, read from `docs/make/papers/*.toml`: one file for each part of the page.

A part is a title, a sentence and its papers. A paper has methods, and a method has either settings that run it or the
reason why nothing runs it here.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

import msgspec

FOLDER = Path(__file__).parent / "papers"
REPOSITORY = Path(__file__).parents[2]
BASE = "configs/papers.yaml"
PARTS = ("reports", "masking", "routes", "losses", "advantages", "asynchrony", "precision", "diagnosis")
"""Files of the table, in the order of the page."""


class Method(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One method of a paper: a row of the page.

    Attributes:
        name: as the paper calls it; no other row has it.
        claim: the paper's claim, in one sentence.
        run: settings laid upon `base`, as on a command line; None where nothing runs it here.
        base: configuration file, relative to the repository.
        note: the part that is here, and how it differs.
        reason: why nothing runs it here.
        figure: our own measurement, in words and numbers.
        at: page and heading where the figure stands, relative to the repository.
    """

    name: str
    claim: str
    run: tuple[str, ...] | None = None
    base: str = BASE
    note: str = ""
    reason: str = ""
    figure: str = ""
    at: str = ""

    def __post_init__(self) -> None:
        if (self.run is None) == (not self.reason):
            raise ValueError(f"{self.name}: exactly one of `run` and `reason` is needed")
        if bool(self.figure) != bool(self.at):
            raise ValueError(f"{self.name}: a `figure` needs the place `at` which it stands, and a place a figure")
        if self.run is None and (self.note or self.base != BASE):
            raise ValueError(f"{self.name}: `note` and `base` belong to a `run`")


class Paper(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A paper, report or post, and its methods. It has an arXiv id, or else a link.

    Attributes:
        title: short, as the page shows it.
        method: its methods, in the paper's order.
        arxiv: arXiv id without version.
        link: address where there is no arXiv id.
    """

    title: str
    method: tuple[Method, ...]
    arxiv: str = ""
    link: str = ""

    def __post_init__(self) -> None:
        if bool(self.arxiv) == bool(self.link):
            raise ValueError(f"{self.title}: exactly one of `arxiv` and `link` is needed")
        if not self.method:
            raise ValueError(f"{self.title}: no method")

    @property
    def address(self) -> str:
        """Where to read it."""
        return self.link or f"https://arxiv.org/abs/{self.arxiv}"


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of the page: a heading, its first sentence, and its papers."""

    title: str
    about: str
    paper: tuple[Paper, ...]


def parse(text: str) -> Part:
    """One part from TOML. Raises `msgspec.ValidationError` for a row that is not whole."""
    return msgspec.convert(tomllib.loads(text), Part, strict=True)


def read() -> tuple[Part, ...]:
    """All parts, in the order of the page."""
    return tuple(parse((FOLDER / f"{name}.toml").read_text(encoding="utf-8")) for name in PARTS)


def rows() -> tuple[tuple[Paper, Method], ...]:
    """Every method with its paper."""
    return tuple((paper, method) for part in read() for paper in part.paper for method in paper.method)
