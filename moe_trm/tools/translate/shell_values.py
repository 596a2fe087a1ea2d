"""Values that a script gives to its variables once and for all, in place of their names; and arithmetic on numbers.

A name is replaced where the script sets it once, whatever happens, to a literal word, above the place and with no
sourced file between. Everything else stays as it was written, and is a to-do.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from moe_trm.tools.translate.shell import Word

_NAME = re.compile(r"\$(?:\{([A-Za-z_]\w*)\}|([A-Za-z_]\w*))")
_ARITHMETIC = re.compile(r"\$\(\(([^$`'\"]*?)\)\)")
_SOURCES = re.compile(r"^[ \t]*(?:source|\.)[ \t]", re.MULTILINE)
_LEFT = re.compile(r"[$`*?~]|\{[^{}]*(?:,|\.\.)[^{}]*\}")
"""Parts of a word that the shell would still replace."""
_KEPT = re.compile(r"'[^'\n]*\$[^'\n]*'|\\\$")
"""A `$` that the shell leaves alone."""
_MATHEMATICS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.Mod: "%"}


def filled(words: Sequence[Word], text: str) -> list[Word]:
    """The words of the script `text`, with values in place of names where the script says them."""
    lines, sourced = text.split("\n"), [text.count("\n", 0, at.start()) + 1 for at in _SOURCES.finditer(text)]
    known_values: dict[str, tuple[str, int]] = {}
    result = []
    for word in words:
        values = {
            name: value
            for name, (value, line) in known_values.items()
            if line < word.line and not any(line < source_line < word.line for source_line in sourced)
        }
        source_text = lines[word.line - 1] if 0 < word.line <= len(lines) else ""
        new = word if not word.dynamic or _KEPT.search(source_text) else _replaced(word, values)
        result.append(new)
        if word.holder and not new.dynamic and not word.doubt and _set_once(word, words, source_text, text):
            known_values[word.holder] = (new.text, word.line)
    return result


def _replaced(word: Word, values: Mapping[str, str]) -> Word:
    def named(match: re.Match[str]) -> str:
        return values.get(match[1] or match[2], match[0])

    def computed(match: re.Match[str]) -> str:
        inner = re.sub(r"[A-Za-z_]\w*", lambda name: values.get(name[0], name[0]), match[1])
        return match[0] if (value := _arithmetic(inner)) is None else str(value)

    text = _ARITHMETIC.sub(computed, _NAME.sub(named, word.text))
    return replace(word, text=text, dynamic=False) if not _LEFT.search(text) else word


def _set_once(word: Word, words: Sequence[Word], line: str, text: str) -> bool:
    """True where nothing else of the script gives the name another value, and the value brings no setting itself."""
    name = re.escape(word.holder)
    if not word.text or word.text.startswith(("-", "+", "~")) or "=" in word.text:
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
