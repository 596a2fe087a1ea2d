"""One name for one thing: few classes share a name, and few files differ from another by an s alone."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = [
    path
    for folder in ("moe_trm", "routing", "launch", "packages")
    for path in (ROOT / folder).rglob("*.py")
    if "build" not in path.relative_to(ROOT).parts  # an installation leaves copies there
]
MOST_SHARED_CLASSES = 10
MOST_PAIRS_OF_FILES = 6


def test_few_classes_share_a_name() -> None:
    names = Counter(
        node.name
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    )
    shared = sorted(name for name, count in names.items() if count > 1)
    assert len(shared) <= MOST_SHARED_CLASSES, shared


def test_few_files_differ_by_an_s() -> None:
    names = {path.stem for path in FILES}
    pairs = sorted(name for name in names if f"{name}s" in names)
    assert len(pairs) <= MOST_PAIRS_OF_FILES, pairs
