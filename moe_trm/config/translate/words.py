"""The words of a launch script, in which users of verl and slime keep their settings.

This is not a shell. Variables that the script itself sets to plain text are filled in, arrays are read in order,
comments and line continuations are honoured. A word that holds anything else (`$(...)`, an unset variable) keeps it,
and its reader reports it.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from moe_trm.errors import ConfigError

_ASSIGNMENT = re.compile(r"^(?:export\s+)?([A-Za-z_]\w*)=(?!\()(.*)$")
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}|\$(\w+)")


def script_words(path: Path) -> list[str]:
    """Every word of the script after variables are filled in. Raises `ConfigError` when it cannot be read."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            "launch script cannot be read", where=str(path), got=str(error), expected="a text file"
        ) from error
    variables: dict[str, str] = {}
    words: list[str] = []
    for line in text.replace("\\\n", " ").splitlines():
        for word in _split(line, str(path)):
            filled = _fill(word, variables)
            assignment = _ASSIGNMENT.match(filled)
            if assignment and not unread(filled):
                variables[assignment[1]] = assignment[2]
            words.append(filled)
    return words


def unread(word: str) -> bool:
    """True when a part of the word could not be resolved."""
    return "$" in word or "`" in word


def _split(line: str, where: str) -> list[str]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars="();")
    lexer.whitespace_split = True
    lexer.commenters = "#"
    try:
        return [word for word in lexer if word not in {"(", ")", ";", "=("}]
    except ValueError:
        # A quotation that spans lines: settings are not written that way; its words are taken as they stand.
        return line.split()


def _fill(word: str, variables: dict[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        name = match[1] or match[3]
        return variables.get(name, match[2] if match[2] is not None else match[0])

    return _VARIABLE.sub(value, word)
