"""The public interface: the page lists it, and what a caller of its version could write still works."""

from __future__ import annotations

import json

import routing
from docs.make import api_page

ADVICE = """
A name or parameter that was added needs `python -m docs.make.api_page --store` and a line in CHANGELOG.md.
Something that callers relied on and that is gone or different is a new version: raise routing.API_VERSION, run the same
command, say in CHANGELOG.md what to write instead, and remove the file of the old version."""


def test_the_page_lists_it() -> None:
    said = api_page.PAGE.read_text(encoding="utf-8")
    assert said.count(api_page.BEGIN) == said.count(api_page.END) == 1
    assert said == api_page.page_with_table(said), f"docs/library.md is not up to date.{ADVICE}"


def test_callers_of_this_version_go_on_working() -> None:
    before = json.loads(api_page.stored(routing.API_VERSION).read_text(encoding="utf-8"))
    assert not api_page.broken(before, api_page.interface()), ADVICE


def test_what_is_added_is_promised_too() -> None:
    before = json.loads(api_page.stored(routing.API_VERSION).read_text(encoding="utf-8"))
    assert before == api_page.interface(), ADVICE


def test_what_breaks_a_caller_is_noticed() -> None:
    def parts(*names: str) -> api_page.Parts:
        """`a` must be given, `a?` may be left out, `*a` is given by name."""
        kinds = {True: "KEYWORD_ONLY", False: "POSITIONAL_OR_KEYWORD"}
        return [[name.strip("*?"), kinds[name.startswith("*")], name.endswith("?")] for name in names]

    before = {"f": parts("a", "b?", "*c", "*d?")}
    for fine in (["a", "b?", "*c", "*d?", "*e?"], ["a?", "b?", "*c?", "*d?"], ["a", "b?", "c", "*d?"]):
        assert not api_page.broken(before, {"f": parts(*fine), "g": []})
    for wrong, said in [
        (["b?", "*c", "*d?"], "a was"),
        (["a", "b", "*c", "*d?"], "b could be left out"),
        (["a", "b?", "*c", "*d?", "*e"], "e is new"),
        (["b?", "a", "*c", "*d?"], "changed places"),
        (["*a", "b?", "*c", "*d?"], "a was"),
        (["a", "x?", "b?", "*c", "*d?"], "changed places"),
    ]:
        assert any(said in one for one in api_page.broken(before, {"f": parts(*wrong)})), wrong
    assert api_page.broken(before, {}) == ["f is gone"]


def test_the_interface_has_methods_and_properties() -> None:
    found = api_page.interface()
    assert ["columns", "KEYWORD_ONLY", True] in found["routing.hf.HFReplayer.use_rows"]
    assert ["lengths", "PROPERTY", True] in found["routing.Rows"]
    assert ["rows", "POSITIONAL_OR_KEYWORD", False] in found["routing.Columns.zigzag"]
