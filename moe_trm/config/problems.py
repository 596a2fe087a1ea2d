"""Problems of a configuration, told all at once and in the user's terms."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from moe_trm.config.fields import lookup, starred, walk
from moe_trm.config.removed import REMOVED
from moe_trm.errors import ConfigError

_SECRET = "api_key"


@dataclass(frozen=True)
class Problem:
    """One thing wrong: the full dotted key (empty when no key is meant), what it is, and what to do."""

    key: str
    what: str
    got: str = ""
    expected: str = ""
    fix: str = ""

    def __str__(self) -> str:
        line = f"{self.key}: {self.what}" if self.key else self.what
        if self.got or self.expected:
            line += f" - got {self.got or 'nothing'}, expected {self.expected}"
        return f"{line}; {self.fix}" if self.fix else line


class InvalidConfigError(ConfigError):
    """Every problem of a configuration in one error; `problems` has them one by one."""

    def __init__(self, where: str, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        lines = "".join(f"\n  {number}. {problem}" for number, problem in enumerate(self.problems, 1))
        noun = "problem" if len(self.problems) == 1 else "problems"
        super().__init__(
            f"configuration refused, {len(self.problems)} {noun} in {where}:{lines}",
            fix="`moe-trm config explain KEY` tells what a key takes",
        )


def from_validation(error: ValidationError) -> list[Problem]:
    """Pydantic's findings in our words, with the full path of each key."""
    return [_problem(details) for details in error.errors(include_url=False)]


def suggest(path: str) -> str:
    """The known keys that resemble an unknown one: misspelt, or right but in another section."""
    paths = [setting.path for setting in walk()]
    parent, _, leaf = path.rpartition(".")
    siblings = [key for key in paths if key.rpartition(".")[0] == starred(parent)]
    close = difflib.get_close_matches(leaf, [key.rpartition(".")[2] for key in siblings], n=1, cutoff=0.6)
    if close:
        return f"{parent}.{close[0]}" if parent else close[0]
    elsewhere = [key for key in paths if key.rpartition(".")[2] == leaf]
    return " or ".join(elsewhere[:3] or difflib.get_close_matches(starred(path), paths, n=1, cutoff=0.7))


def _problem(details: Any) -> Problem:
    key = ".".join(str(part) for part in details["loc"])
    kind, value = details["type"], details["input"]
    if kind == "extra_forbidden" and key in REMOVED:
        return Problem(key, "no longer a setting", fix=f"leave it out: {REMOVED[key]}")
    if kind == "extra_forbidden":
        suggestion = suggest(key)
        parent = lookup(key.rpartition(".")[0]) if "." in key else None
        names = ", ".join(parent.section.model_fields) if parent and parent.section else ""
        return Problem(
            key,
            "unknown key",
            fix=f"did you mean {suggestion}?"
            if suggestion
            else (f"known here: {names}" if names else "see `moe-trm config explain`"),
        )
    setting = lookup(key)
    expected = setting.type_text if setting else details["msg"].removeprefix("Input should be ")
    if kind == "missing":
        return Problem(key, "required and missing", fix=f"set {key} ({setting.doc if setting else expected})")
    if setting and setting.section:
        expected = "a section with " + ", ".join(setting.section.model_fields)
    fix = (
        f'write {key}: "{value}" in YAML, quotes included'
        if kind == "string_type" and isinstance(value, (int, float))
        else ""
    )
    if kind == "value_error":
        fix = str(details["ctx"]["error"])
    return Problem(key, "bad value", got=_shown(key, value), expected=expected, fix=fix)


def _shown(key: str, value: object) -> str:
    if key.endswith(_SECRET):
        return "a secret"
    text = "none" if value is None else repr(value)
    return f"{text[:80]} ({type(value).__name__})" if value is not None else text


def refuse(where: str, problems: Iterable[Problem]) -> None:
    """Raise `InvalidConfigError` when there is any problem."""
    problem_list = list(problems)
    if problem_list:
        raise InvalidConfigError(where, problem_list)
