"""The table of mutants, read from the TOML files beside this module.

A mutant is anchored by syntax: a file, a function in it, and an expression or a statement of that function as Python
parses it. So it stays where it is when code around it moves, is laid out anew or gets other comments.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
SOURCES = ("moe_trm", "routing", "launch")


@dataclass(frozen=True)
class Mutant:
    """One change of one function that breaks one rule, and the tests that must fail with it.

    Attributes:
        file: path from the root of the repository.
        function: qualified name, such as `Class.method`; empty for the module as a whole.
        rule: the wrong rule that the mutant follows.
        old: an expression or a statement that the function has exactly once; layout and comments do not matter.
        new: the code that takes its place.
        tests: arguments of pytest, files or node ids.
    """

    file: str
    function: str
    rule: str
    old: str
    new: str
    tests: tuple[str, ...]

    def apply(self, root: Path) -> str:
        """Change the file below `root`; its text as it was.

        Raises:
            LookupError: the file or the function is gone, `old` does not stand exactly once in it, or `new` is no
                change.
        """
        path = root / self.file
        if not path.is_file():
            raise LookupError(f"{self.rule}: {self.file} is gone{self._elsewhere(root)}")
        text = path.read_text()
        tree = ast.parse(text)
        scope = function_of(tree, self.function)
        if scope is None:
            raise LookupError(f"{self.rule}: {self.file} has no {self.function}{self._elsewhere(root)}")
        old, new = parsed(self.old), parsed(self.new)
        matches = [node for node in ast.walk(scope) if ast.dump(node) == ast.dump(old)]
        if len(matches) != 1 or ast.dump(old) == ast.dump(new):
            place = f"{self.function or 'the module'} of {self.file}"
            raise LookupError(f"{self.rule}: `{self.old}` stands {len(matches)} times in {place}, expected once")
        path.write_text(ast.unparse(ast.fix_missing_locations(_Replacement(matches[0], new).visit(tree))))
        return text

    def _elsewhere(self, root: Path) -> str:
        """The files that have a function of this name now, for a message."""
        files = (path for source in SOURCES for path in sorted((root / source).rglob("*.py")))
        named = [
            str(path.relative_to(root)) for path in files if function_of(ast.parse(path.read_text()), self.function)
        ]
        return f"; {self.function} is in {', '.join(named)}" if self.function and named else ""


class _Replacement(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self._old, self._new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return self._new if node is self._old else super().visit(node)


def parsed(text: str) -> ast.AST:
    """The expression, or else the one statement, that `text` is."""
    [statement] = ast.parse(text).body
    return statement.value if isinstance(statement, ast.Expr) else statement


def function_of(tree: ast.Module, name: str) -> ast.AST | None:
    """The function or class of this qualified name; the module for an empty one."""
    scope: ast.AST = tree
    for part in filter(None, name.split(".")):
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        inner = [
            node for node in ast.walk(scope) if isinstance(node, kinds) and node.name == part and node is not scope
        ]
        if not inner:
            return None
        scope = inner[0]
    return scope


def read(folder: Path = FOLDER) -> Iterator[Mutant]:
    """All mutants, file by file. A row of `mutants` is the function, the rule, the old and the new code."""
    for path in sorted(folder.glob("*.toml")):
        for entry in tomllib.loads(path.read_text())["source"]:
            for function, rule, old, new in entry["mutants"]:
                yield Mutant(entry["file"], function, rule, old, new, tuple(entry["tests"]))
