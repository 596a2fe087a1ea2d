"""Values, not the configuration: few functions see all of it, and the number only falls."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMIT = 60
"""Functions, methods and callable types that take the whole `Config`. Builders may; lower this with each that goes."""
SEARCHED = "plan"
"""The planner is left out: configurations are what it searches."""


def takes_config(tree: ast.AST) -> Iterator[str]:
    """Functions and methods with a parameter annotated `Config`, and types of callables that take one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = node.args
            every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
            if any(one and one.annotation and _names_config(one.annotation) for one in every):
                yield f"{node.name}:{node.lineno}"
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("Callable"):
            parameters = node.slice.elts[0] if isinstance(node.slice, ast.Tuple) else node.slice
            if _names_config(parameters):
                yield f"{ast.unparse(node)}:{node.lineno}"


def _names_config(annotation: ast.AST) -> bool:
    words = {node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)}
    words |= {node.attr for node in ast.walk(annotation) if isinstance(node, ast.Attribute)}
    quoted = [node.value for node in ast.walk(annotation) if isinstance(node, ast.Constant)]
    inner = [ast.parse(text, mode="eval") for text in quoted if isinstance(text, str) and "Config" in text]
    return "Config" in words or any(_names_config(tree) for tree in inner)


def test_few_functions_take_the_whole_configuration() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{place}"
        for folder in ("moe_trm", "launch")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if path.parent.name != SEARCHED
        for place in takes_config(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert len(found) <= LIMIT, "\n".join(found)


def test_every_way_to_take_it_is_counted() -> None:
    source = """
def plain(config: Config): ...
def several(configs: Mapping[str, Config]): ...
def quoted(*, config: "Config | None" = None): ...
class A:
    def method(self, config: schema.Config): ...
check: Callable[[Config, int], None]
def sections(learner: LearnerConfig) -> Config: ...
def given(make: Callable[[int], Config]): ...
"""
    counted = [place.partition(":")[0] for place in takes_config(ast.parse(source))]
    assert sorted(counted) == ["Callable[[Config, int], None]", "given", "method", "plain", "quoted", "several"]
