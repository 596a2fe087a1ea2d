"""Values that a script gives to its variables once and for all, in place of their names; arithmetic; and defaults.

A name is replaced where the script sets it once, whatever happens, to a literal word, above the place and with no
sourced file between. `${NAME:-word}` is the word where the script does not set the name: that is what bash makes of it
unless the name is set before the script starts, and the word remembers that. Everything else stays as it was written,
and is a to-do.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace

from moe_trm.tools.translate.shell import Word

_NAME = re.compile(r"\$(?:\{([A-Za-z_]\w*)\}|([A-Za-z_]\w*))")
_ARITHMETIC = re.compile(r"\$\(\(([^$`'\"]*?)\)\)")
_SOURCES = re.compile(r"^[ \t]*(?:source|\.)[ \t]", re.MULTILINE)
_DEFAULT = re.compile(r"\$\{([A-Za-z_]\w*)(:?)([-=])([^{}$`]*)\}")
_ASSIGNED_DEFAULT = re.compile(r"^[ \t]*:[ \t]+(\"?)(\$\{([A-Za-z_]\w*):?=[^{}$`]*\})\1[ \t]*(?:#.*)?$", re.MULTILINE)
_LEFT = re.compile(r"[$`*?~]|\{[^{}]*(?:,|\.\.)[^{}]*\}")
"""Parts of a word that the shell would still replace."""
_SET_OTHERWISE = re.compile(
    r"\b(?:for|select|read(?:[ \t]+-\w+)*|unset|let|getopts|mapfile)[ \t]+(?:-\w+[ \t]+)*([A-Za-z_]\w*)"
)
"""Variables that something but an assignment sets."""
_KEPT = re.compile(r"'[^'\n]*\$[^'\n]*'|\\\$")
"""A `$` that the shell leaves alone."""
_MATHEMATICS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.Mod: "%"}


@dataclass(frozen=True)
class _Value:
    """A variable's value from one line on, and the variables outside that it depends on."""

    text: str
    line: int
    outside: tuple[str, ...] = ()


def filled(words: Sequence[Word], text: str) -> list[Word]:
    """The words of the script `text`, with values in place of names where the script says them."""
    lines, sourced = text.split("\n"), [text.count("\n", 0, at.start()) + 1 for at in _SOURCES.finditer(text)]
    set_here = {word.holder for word in words} | {match[1] for match in _SET_OTHERWISE.finditer(text)}
    known_values = _assigned_defaults(text, set_here)
    result = []
    for word in words:
        values = {
            name: value
            for name, value in known_values.items()
            if value.line < word.line and not any(value.line < source_line < word.line for source_line in sourced)
        }
        source_text = lines[word.line - 1] if 0 < word.line <= len(lines) else ""
        after_source = any(source_line < word.line for source_line in sourced)
        set_by_others = None if after_source else set_here - {word.holder}
        new = word if not word.dynamic or _KEPT.search(source_text) else _replaced(word, values, set_by_others)
        result.append(new)
        if word.holder and not new.dynamic and not word.doubt and _set_once(word, new, words, source_text, text):
            known_values[word.holder] = _Value(new.text, word.line, new.outside)
    return result


def _assigned_defaults(text: str, set_here: set[str]) -> dict[str, _Value]:
    """Values of `: ${NAME:=word}` by name, where nothing else of the script sets it."""
    values = {}
    for match in _ASSIGNED_DEFAULT.finditer(text):
        word = Word(match[2], text.count("\n", 0, match.start()) + 1, dynamic=True)
        new = _replaced(word, {}, set_here)
        if not new.dynamic:
            values[match[3]] = _Value(new.text, word.line, new.outside)
    return values


def _replaced(word: Word, values: Mapping[str, _Value], set_here: Set[str] | None) -> Word:
    """The word with its names, defaults and sums replaced.

    `set_here`: variables whose value the script may change, and which have no default for that; none: all of them.
    """
    outside: list[str] = []

    def value_of(name: str) -> str | None:
        if name not in values:
            return None
        outside.extend(values[name].outside)
        return values[name].text

    def named(match: re.Match[str]) -> str:
        value = value_of(match[1] or match[2])
        return match[0] if value is None else value

    def default(match: re.Match[str]) -> str:
        value, word_text = value_of(match[1]), match[4]
        if value is not None and (value or not match[2]):
            return value
        quoted = re.fullmatch(r"([\"'])(.*)\1", word_text)
        bare = quoted[2] if quoted else word_text
        if re.search(r"[\"'\\]", bare) or (value is None and (set_here is None or match[1] in set_here)):
            return match[0]
        if value is None:
            outside.append(match[1])
        return bare

    def computed(match: re.Match[str]) -> str:
        inner = re.sub(r"[A-Za-z_]\w*", lambda name: value_of(name[0]) or name[0], match[1])
        return match[0] if (value := _arithmetic(inner)) is None else str(value)

    text, previous_text = word.text, ""
    while text != previous_text:
        previous_text, text = text, _DEFAULT.sub(default, _NAME.sub(named, text))
    text = _ARITHMETIC.sub(computed, text)
    if _LEFT.search(text) or (not word.holder and re.search(r"\s", text) and not re.search(r"\s", word.text)):
        return word
    return replace(word, text=text, dynamic=False, outside=tuple(dict.fromkeys(outside)))


def _set_once(word: Word, new: Word, words: Sequence[Word], line: str, text: str) -> bool:
    """True where nothing else of the script gives the name another value, and the value brings no setting itself."""
    name = re.escape(word.holder)
    if not new.text or re.match(r"[+~]|-(?![\d.]+$)", new.text) or "=" in new.text:
        return False
    if any(candidate.holder == word.holder and candidate is not word for candidate in words):
        return False
    lone_assignment = rf"(?:.*;)?\s*(?:export\s+|readonly\s+)?{name}=([\"']?){re.escape(word.text)}\1\s*(?:[;#].*)?"
    read = rf"\b(?:for|select|read|unset|let|getopts|mapfile|printf)\b[^\n;]*\b{name}\b"
    counted = rf"\(\([^)\n]*\b{name}\s*(?:\S?=|\+\+|--)"
    return bool(re.fullmatch(lone_assignment, line)) and not re.search(f"{read}|{counted}", text)


def _arithmetic(text: str) -> int | None:
    """Whole numbers with + - * / % and brackets, as the shell computes them; None for anything else."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except SyntaxError:
        return None
    return _value(tree)


def _value(node: ast.AST) -> int | None:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if not isinstance(node, ast.BinOp) or type(node.op) not in _MATHEMATICS:
        return None
    left_value, right = _value(node.left), _value(node.right)
    if left_value is None or right is None:
        return None
    match _MATHEMATICS[type(node.op)]:
        case "+":
            return left_value + right
        case "-":
            return left_value - right
        case "*":
            return left_value * right
        case sign:
            if right <= 0 or left_value < 0:
                return None
            return left_value // right if sign == "/" else left_value % right
