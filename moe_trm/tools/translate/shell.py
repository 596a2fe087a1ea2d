"""The literal words of a shell script, with their lines. Nothing is run.

A word with a variable, a command or a pattern in it is not literal. A word under `if`, in a loop, in a function or
after `||` is literal, but only the script knows if it counts. The readers of these words list both as to-dos.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace

from moe_trm.errors import ConfigError

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_REFERENCE = re.compile(r"\$\{?([A-Za-z_]\w*)")
_ARITHMETIC = re.compile(r"\$\(\((.*?)\)\)")
_OPERATORS = ("\n", "<<<", "<<-", "<<", "&&", "||", ";;", ">>", "<(", ">(", ";", "&", "|", "(", ")", "<", ">")
_OPENERS = frozenset({"if", "for", "while", "until", "case", "select", "{"})
_CLOSERS = frozenset({"fi", "done", "esac", "}"})
_CONNECTORS = frozenset({"then", "do", "else", "elif", "!", "time"})
_DECLARING = frozenset({"export", "local", "declare", "readonly", "typeset"})
_TESTS = frozenset({"[", "[[", "test"})


@dataclass(frozen=True)
class Word:
    """A word of the script.

    Attributes:
        text: without its quotes; what the shell would replace stands as it was written.
        line: counted from 1.
        dynamic: the shell would replace a part of it.
        command: words of one command, array or variable have the same number.
        holder: the array or variable that has it; empty for a command's word. An empty one has one empty word.
        doubt: why it may not count, e.g. `the script decides if this is set`; empty when it does.
        outside: variables that have their defaults in it, as long as nothing sets them before the script starts.
    """

    text: str
    line: int
    dynamic: bool = False
    command: int = 0
    holder: str = ""
    doubt: str = ""
    outside: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    line: int
    dynamic: bool = False
    adjacent: bool = False


def words_of(text: str, where: str, starts: re.Pattern[str]) -> list[Word]:
    """Every word of the script, in the order of the file.

    Args:
        text: the script.
        where: its name, for errors.
        starts: a word with this in it makes a command the one that starts the training.
    Raises:
        ConfigError: a quote or a bracket that never ends.
    """
    return _doubted(_Commands(_Lexer(text, where).tokens()).words(), starts, text)


def references(word: str) -> list[str]:
    """Names of the variables that a word refers to."""
    inside = (name for text in _ARITHMETIC.findall(word) for name in re.findall(r"[A-Za-z_]\w*", text))
    return [*_REFERENCE.findall(word), *inside]


def _doubted(words: list[Word], starts: re.Pattern[str], text: str) -> list[Word]:
    """Words that the training's command does not get, or that are set anew, may not count."""
    main = {word.command for word in words if not word.holder and starts.search(word.text)}
    if not main:
        return words
    passed = _passed_on(words, main)
    anew = Counter({word.command: word.holder for word in words if word.holder and not word.doubt}.values())
    appended = set(re.findall(r"([A-Za-z_]\w*)\+=", text))
    result = []
    for word in words:
        name, doubt = word.holder, word.doubt
        if not name and word.command not in main:
            doubt = doubt or "it does not stand in the command that starts the training"
        elif name and name not in passed:
            doubt = doubt or f"the script sets {name} but does not pass it on"
        elif name:
            doubt = doubt or passed[name]
            if anew[name] > 1 and name not in appended:
                doubt = doubt or f"the script sets {name} more than once"
        result.append(replace(word, doubt=doubt))
    return result


def _passed_on(words: list[Word], main: set[int]) -> dict[str, str]:
    """Arrays and variables that the training's command gets, directly or within others; with what is doubtful of it."""
    passed: dict[str, str] = {}
    grown = True
    while grown:
        grown = False
        for word in words:
            if (word.holder and word.holder not in passed) or (not word.holder and word.command not in main):
                continue
            doubt = word.doubt or passed.get(word.holder, "")
            for name in references(word.text):
                if name not in passed or (passed[name] and not doubt):
                    passed[name], grown = doubt, True
    return passed


def _apart(text: str) -> list[str]:
    """Words between spaces; what stands in `$(...)` stays together."""
    pieces, depth = [""], 0
    for char in text:
        depth = max(0, depth + (char == "(" and (depth > 0 or pieces[-1].endswith("$"))) - (char == ")"))
        if char.isspace() and not depth:
            pieces.append("")
        else:
            pieces[-1] += char
    return [word for word in pieces if word]


class _Lexer:
    """Words and operators of a script, by the quoting rules of the shell."""

    def __init__(self, text: str, where: str) -> None:
        self.text, self.where, self.at, self.line = text.replace("\r\n", "\n"), where, 0, 1

    def tokens(self) -> list[_Token]:
        token_list: list[_Token] = []
        ends: list[str] = []
        while self.at < len(self.text):
            start, line, char = self.at, self.line, self.text[self.at]
            if char in " \t":
                self._skip(1)
            elif self.text.startswith("\\\n", self.at):
                self._skip(2)
            elif char == "#":
                self._skip(self._end_of_line() - self.at)
            elif (operator := self._operator()) is not None:
                last = token_list[-1] if token_list else None
                adjacent = last is not None and last.kind == "word" and self.text[start - 1] not in " \t\n"
                self._skip(len(operator))
                if operator in ("<<", "<<-"):
                    ends.append(self._word().text)
                elif operator in ("<", ">", ">>", "<<<"):
                    self._redirected()
                else:
                    token_list.append(_Token("op", operator, line, adjacent=adjacent))
                if operator == "\n" and ends:
                    token_list += [_Token("document", self._document(end), line + 1) for end in ends]
                    ends = []
            else:
                token_list.append(self._word())
        return [*token_list, _Token("op", "\n", self.line)]

    def _operator(self) -> str | None:
        return next((name for name in _OPERATORS if self.text.startswith(name, self.at)), None)

    def _redirected(self) -> None:
        if self.text.startswith("&", self.at):
            self._skip(1)
        while self.at < len(self.text) and self.text[self.at] in " \t":
            self._skip(1)
        if self.at < len(self.text) and self._operator() is None:
            self._word()

    def _document(self, end: str) -> str:
        """The text of a here-document, which is no command."""
        lines = []
        while self.at < len(self.text):
            stop = self._end_of_line()
            line = self.text[self.at : stop]
            self._skip(stop - self.at + 1)
            if line.strip() == end:
                break
            lines.append(line)
        return "\n".join(lines)

    def _word(self) -> _Token:
        while self.at < len(self.text) and self.text[self.at] in " \t":
            self._skip(1)
        start, line, dynamic = self.at, self.line, False
        parts: list[str] = []
        while self.at < len(self.text):
            char = self.text[self.at]
            if char in " \t\n;&|<>()":
                break
            if char == "'":
                parts.append(self._quoted("'"))
            elif char == '"':
                inner, moved = self._double()
                parts.append(inner)
                dynamic |= moved
            elif char == "\\":
                parts.append("" if self.text.startswith("\\\n", self.at) else self.text[self.at + 1 : self.at + 2])
                self._skip(2)
            elif char in "$`":
                parts.append(self._replaced())
                dynamic = True
            else:
                dynamic |= char in "*?" or (char == "~" and self.at == start)
                parts.append(char)
                self._skip(1)
        raw = self.text[start : self.at]
        dynamic |= bool(re.search(r"(?<!\$)\{[^{}'\"]*(,|\.\.)[^{}'\"]*\}", raw)) and not raw.startswith(("'", '"'))
        return _Token("word", "".join(parts), line, dynamic)

    def _quoted(self, quote: str) -> str:
        end = self.text.find(quote, self.at + 1)
        if end < 0:
            raise self._endless(quote)
        inner = self.text[self.at + 1 : end]
        self._skip(end + 1 - self.at)
        return inner

    def _double(self) -> tuple[str, bool]:
        begin, moved = self.at, False
        parts: list[str] = []
        self._skip(1)
        while self.at < len(self.text):
            char = self.text[self.at]
            if char == '"':
                self._skip(1)
                return "".join(parts), moved
            if char == "\\" and self.text[self.at + 1 : self.at + 2] in ("\n", '"', "$", "`", "\\"):
                parts.append(self._joint() if self.text[self.at + 1] == "\n" else self.text[self.at + 1])
                moved |= self.text[self.at + 1] in "$`"
                self._skip(2)
            elif char in "$`":
                parts.append(self._replaced())
                moved = True
            else:
                parts.append(char)
                self._skip(1)
        self.at = begin
        raise self._endless('"')

    def _joint(self) -> str:
        """A continued line in a text: a new line of it where there is a space beside, which separates words too."""
        around = self.text[self.at - 1 : self.at] + self.text[self.at + 2 : self.at + 3]
        return "\n" if any(char.isspace() for char in around) else ""

    def _replaced(self) -> str:
        """`$name`, `${...}`, `$(...)` or a command in backquotes, as it was written."""
        start = self.at
        if self.text[self.at] == "`":
            self._quoted("`")
        elif self.text.startswith("$'", self.at):
            self._skip(1)
            self._quoted("'")
        elif self.text.startswith(("${", "$("), self.at):
            self._skip(1)
            self._balanced()
        else:
            name = re.compile(r"\$(\w+|.)?", re.DOTALL).match(self.text, self.at)
            self._skip(len(name[0]) if name else 1)
        return self.text[start : self.at]

    def _balanced(self) -> None:
        opened, begin = 0, self.at
        closing = {"(": ")", "{": "}"}[self.text[self.at]]
        opening = self.text[self.at]
        while self.at < len(self.text):
            char = self.text[self.at]
            if char == "\\":
                self._skip(2)
                continue
            if char == "'" and opening == "(":
                self._quoted("'")
                continue
            if char == '"':
                self._double()
                continue
            opened += (char == opening) - (char == closing)
            self._skip(1)
            if opened == 0:
                return
        self.at = begin
        raise self._endless(opening)

    def _end_of_line(self) -> int:
        end = self.text.find("\n", self.at)
        return len(self.text) if end < 0 else end

    def _skip(self, count: int) -> None:
        self.line += self.text.count("\n", self.at, self.at + count)
        self.at += count

    def _endless(self, mark: str) -> ConfigError:
        line = self.text.count("\n", 0, self.at) + 1
        return ConfigError(
            "the script cannot be read",
            where=f"{self.where}, line {line}",
            got=f"{mark} that never ends",
            expected="a shell script, or a list of arguments",
        )


class _Commands:
    """Words by command, array and variable, with what decides about them."""

    def __init__(self, tokens: list[_Token]) -> None:
        self.tokens, self.found, self.number, self.depth = tokens, list[Word](), 0, 0

    def words(self) -> list[Word]:
        command: list[_Token] = []
        after, at = "", 0
        while at < len(self.tokens):
            token = self.tokens[at]
            array = command[-1] if command and token.text == "(" and token.adjacent else None
            if token.kind == "document":
                self._inside(token.text, token.line, "", "it stands in a here-document")
            elif token.kind == "word":
                command.append(token)
            elif array is not None and re.fullmatch(r"[A-Za-z_]\w*\+?=", array.text):
                command.pop()
                at = self._array(array.text.rstrip("+="), at + 1, after)
            else:
                self._end(command, after)
                if token.text in ("&&", "||") and command:
                    tested = token.text == "||" or command[0].text in _TESTS
                    after = "the script decides if this is set" if tested else after
                elif token.text in ("\n", ";", ";;"):
                    after = ""
                command = []
            at += 1
        return self.found

    def _doubt(self, after: str) -> str:
        return "the script decides if this is set" if self.depth > 0 else after

    def _array(self, name: str, at: int, after: str) -> int:
        self.number += 1
        while at < len(self.tokens) and self.tokens[at].text != ")":
            token = self.tokens[at]
            if token.kind == "word":
                self._add(token, name, self._doubt(after))
            at += 1
        if not self.found or self.found[-1].command != self.number:
            self.found.append(Word("", self.tokens[at - 1].line, False, self.number, name, self._doubt(after)))
        return at

    def _end(self, command: list[_Token], after: str) -> None:
        self.number += 1
        rest = list(command)
        while rest and (rest[0].text in _CONNECTORS | _OPENERS | _CLOSERS):
            first = rest.pop(0).text
            self.depth = max(0, self.depth + (first in _OPENERS) - (first in _CLOSERS))
        self.depth += bool(rest) and rest[0].text == "function" and rest[-1].text == "{"
        declares = bool(rest) and rest[0].text in _DECLARING
        rest = rest[1:] if declares else rest
        while rest and (assignment := _ASSIGNMENT.fullmatch(rest[0].text)):
            self._inside(assignment[3], rest[0].line, assignment[1], self._doubt(after))
            rest = rest[1:]
        for token in rest:
            self._add(token, "", self._doubt(after))

    def _inside(self, text: str, line: int, name: str, doubt: str) -> None:
        """Words in the text of a variable or a document."""
        self.number += 1
        if name and not text.strip():
            self.found.append(Word("", line, False, self.number, name, doubt))
        for offset, part in enumerate(text.split("\n")):
            for word in _apart(part):
                dynamic = bool(re.search(r"[$`*?~\"']", word))
                self.found.append(Word(word, line + offset, dynamic, self.number, name, doubt))

    def _add(self, token: _Token, holder: str, doubt: str) -> None:
        self.found.append(Word(token.text, token.line, token.dynamic, self.number, holder, doubt))
