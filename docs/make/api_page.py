"""Write the table of the public interface in docs/library.md: `python -m docs.make.api_page`.

With `--store` it also writes tests/data/api-VERSION.json, which holds what callers of this version rely on.
"""

from __future__ import annotations

import argparse
import inspect
import json
from collections.abc import Callable, Iterator
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import routing

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "library.md"
BEGIN, END = "<!-- public interface -->", "<!-- end of the public interface -->"
MODULES = {
    "routing": tuple(name for name in routing.__all__ if name != "API_VERSION"),
    "routing.hf": ("HFReplayer",),
    "routing.hf_context": ("replay", "Replayed"),
    "routing.replay": ("Native", "Record", "ReplayRecords", "ReplayRecorded", "ReplayReport"),
    "routing.megatron": ("MegatronReplayer",),
    "routing.sglang": ("decode_payload",),
    "routing.vllm": ("decode_payload",),
    "moe_trm.corrections.plain": ("bind", "correct", "Corrected"),
}
"""The stable names, by module."""
Parts = list[list[Any]]
"""For each parameter or property: its name, its kind, and whether a caller may leave it out."""


def stored(version: int) -> Path:
    """The file of the interface on which callers of an API version rely."""
    return ROOT / "tests" / "data" / f"api-{version}.json"


def stable() -> Iterator[tuple[str, Any]]:
    """Every stable function and class by its full name."""
    for module, names in MODULES.items():
        for name in names:
            yield f"{module}.{name}", getattr(import_module(module), name)


def interface() -> dict[str, Parts]:
    """Parameters of functions, constructors and public methods; with the class, its public properties."""
    parts_by_name: dict[str, Parts] = {}
    for name, thing in stable():
        parts_by_name[name] = _parts(thing)
        for inner, value in vars(thing).items() if inspect.isclass(thing) else ():
            if inner.startswith("_"):
                continue
            if isinstance(value, property | cached_property):
                parts_by_name[name].append([inner, "PROPERTY", True])
            elif inspect.isfunction(getattr(value, "__func__", value)):
                parts_by_name[f"{name}.{inner}"] = _parts(getattr(thing, inner))
    return parts_by_name


def broken(earlier: dict[str, Parts], later: dict[str, Parts]) -> list[str]:
    """Words on all that a caller of the old interface could write and the new one no longer takes."""
    problems = []
    for name, parts in earlier.items():
        if name not in later:
            problems.append(f"{name} is gone")
            continue
        current = {key: (kind, optional) for key, kind, optional in later[name]}
        for key, kind, optional in parts:
            kind_now, optional_now = current.pop(key, ("gone", True))
            if kind_now not in (kind, "POSITIONAL_OR_KEYWORD" if kind == "KEYWORD_ONLY" else kind):
                problems.append(f"{name}: {key} was {kind}, and is {kind_now}")
            elif optional and not optional_now:
                problems.append(f"{name}: {key} could be left out")
        problems += [
            f"{name}: {key} is new and must be given" for key, (_, optional) in current.items() if not optional
        ]
        old, new = ([key for key, kind, _ in side if kind == "POSITIONAL_OR_KEYWORD"] for side in (parts, later[name]))
        if new[: len(old)] != old:
            problems.append(f"{name}: arguments have changed places")
    return problems


def table() -> str:
    """Names and signatures of functions and classes."""
    lines = [f"API version {routing.API_VERSION}.", "", "| name | takes |", "|---|---|"]
    for name, thing in stable():
        shown = ", ".join(_shown(_signature(thing)))
        lines.append(f"| `{name}` | `({shown})` |")
    return "\n".join(lines)


def page_with_table(text: str) -> str:
    """The page `text` with the table of today."""
    head, _, rest = text.partition(BEGIN)
    return f"{head}{BEGIN}\n\n{table()}\n\n{END}{rest.partition(END)[2]}"


def _parts(function: Callable[..., Any]) -> Parts:
    return [
        [
            item.name,
            item.kind.name,
            item.default is not item.empty or item.kind in (item.VAR_POSITIONAL, item.VAR_KEYWORD),
        ]
        for item in _signature(function).parameters.values()
    ]


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    constructor: Any = function.__init__ if inspect.isclass(function) else function
    # A class without a constructor of its own: versions of Python differ on it.
    return (
        inspect.signature(function)
        if inspect.isroutine(constructor) and hasattr(constructor, "__code__")
        else inspect.Signature()
    )


def _shown(signature: inspect.Signature) -> Iterator[str]:
    """Parameters without their types."""
    starred = False
    for item in signature.parameters.values():
        if item.kind is item.KEYWORD_ONLY and not starred:
            starred = True
            yield "*"
        starred = starred or item.kind is item.VAR_POSITIONAL
        mark = "*" if item.kind is item.VAR_POSITIONAL else "**" if item.kind is item.VAR_KEYWORD else ""
        default = "" if item.default is item.empty else f"={item.default!r}"
        # What a dataclass makes anew has no value to show.
        yield f"{mark}{item.name}{'=...' if '<' in default else default}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", action="store_true", help="write tests/data/api-VERSION.json too")
    store = parser.parse_args().store
    PAGE.write_text(page_with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    if store:
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(parts)}" for name, parts in interface().items())
        stored(routing.API_VERSION).write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
