"""Variables have nouns for names: a pronoun or a participle alone does not say what it holds."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BARE = frozenset(
    {
        *("found", "own", "one", "each", "told", "said", "wanted", "chosen", "given", "known", "others", "other"),
        *("every", "whole", "there", "some", "left", "now", "before", "these", "both", "apart", "alone", "whose"),
    }
)
PRODUCT = ("moe_trm", "routing", "launch", "packages")
TOOLS = (("benchmarks",), ("examples",), ("docs/make",), ("tests/drills", "tests/mutants", "tests/standins"))
MOST = 0.005
"""Share of all names that are bound. Other projects of the field have 0.001."""


def bound_names(tree: ast.AST) -> Iterator[str]:
    """Every name that is assigned or is a parameter."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg


@pytest.mark.parametrize("folders", [PRODUCT, *TOOLS], ids=lambda folders: folders[0])
def test_names_say_what_they_hold(folders: tuple[str, ...]) -> None:
    names = Counter[str]()
    for folder in folders:
        for path in (ROOT / folder).rglob("*.py"):
            if "build" not in path.relative_to(ROOT).parts:
                names.update(bound_names(ast.parse(path.read_text(encoding="utf-8"))))
    assert names
    bare = Counter({name: names[name] for name in BARE})
    assert bare.total() <= MOST * names.total(), bare.most_common(8)


def test_a_bare_name_is_counted() -> None:
    assert list(bound_names(ast.parse("def f(own): found = own"))) == ["own", "found"]
