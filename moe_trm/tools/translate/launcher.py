"""The arguments that a Python launcher passes to `execute_train`, as miles' launchers do. The syntax tree is read;
nothing of it is run.

Literal texts, names of literals, options of the launcher with a literal default, and tests of these are followed.
Whatever else a word has in it stays as `${...}`, and a word under a test that cannot be decided is doubtful: readers
list both as to-dos.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from moe_trm.errors import ConfigError
from moe_trm.tools.translate.shell import Word, words_of

_OPERATORS: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda item, group: item in group,
    ast.NotIn: lambda item, group: item not in group,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}
_DECIDES = "the launcher decides if this is set"


@dataclass(frozen=True)
class _Piece:
    """A part of an argument text: where it stands, why it may not count, and the launcher's options in it."""

    text: str
    line: int
    doubt: str = ""
    outside: tuple[str, ...] = ()


class _OpenError(Exception):
    """A value that only running the launcher would show."""


def launcher_words(text: str, where: str) -> list[Word]:
    """Words of the training's command line.

    Args:
        text: the launcher.
        where: its name, for errors.
    Raises:
        ConfigError: not Python, or it starts no training by `execute_train(train_args=...)`.
    """
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise _refused(where, f"line {error.lineno} is not Python") from error
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and (call := _start(function.body)) is not None:
            reader = _Reader(tree)
            reader.run(function.body)
            return _words(call, reader, where)
    raise _refused(where, "no call of execute_train(train_args=...)")


def _refused(where: str, got: str) -> ConfigError:
    return ConfigError(
        "a Python launcher computes its arguments",
        where=where,
        got=got,
        expected="a launcher of miles, or the arguments that it passes",
        fix="save them, e.g. from /proc/PID/cmdline of a running job, and translate that file",
    )


def _start(body: Sequence[ast.stmt]) -> ast.Call | None:
    calls = (node for statement in body for node in ast.walk(statement) if isinstance(node, ast.Call))
    return next(
        (call for call in calls if _named(call.func) == "execute_train" and _argument(call, "train_args")), None
    )


def _named(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _argument(call: ast.Call, name: str) -> ast.expr | None:
    return next((keyword.value for keyword in call.keywords if keyword.arg == name), None)


def _words(call: ast.Call, reader: _Reader, where: str) -> list[Word]:
    script, arguments = _argument(call, "train_script"), _argument(call, "train_args")
    program = reader.pieces(script) if script is not None else [_Piece("train.py", call.lineno)]
    return [
        replace(word, line=piece.line, command=1, doubt=piece.doubt, outside=piece.outside)
        for piece in [*program, *_joined(reader.pieces(arguments) if arguments is not None else [])]
        for word in words_of(piece.text, where, re.compile(r"$^"))
    ]


def _joined(pieces: Sequence[_Piece]) -> Iterator[_Piece]:
    """Pieces that begin and end between words."""
    pending: _Piece | None = None
    for piece in pieces:
        if pending is not None and _goes_on(pending.text, piece.text):
            outside = tuple(dict.fromkeys((*pending.outside, *piece.outside)))
            pending = _Piece(pending.text + piece.text, pending.line, pending.doubt or piece.doubt, outside)
        else:
            if pending is not None:
                yield pending
            pending = piece
    if pending is not None:
        yield pending


def _goes_on(text: str, more: str) -> bool:
    """True where a word of `text` has its end in `more`. After a function's result a flag or another result begins."""
    if text.endswith("[@]}") and more.startswith(("--", "${")):
        return False
    return bool(text) and not text[-1].isspace() and not more[:1].isspace()


class _Reader:
    """The texts and values of a launcher's names, statement by statement."""

    def __init__(self, tree: ast.Module) -> None:
        stored = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and _is_stored(node)}
        self.options: dict[str, Any] = {}
        self.texts: dict[str, list[_Piece]] = {}
        self.values: dict[str, Any] = {}
        self.tested: tuple[str, ...] = ()
        self.used: list[str] = []
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                self._add_options(node, stored)
            elif isinstance(node, ast.Assign):
                self._assign(node.targets[0], node.value, "")

    def _add_options(self, node: ast.ClassDef, stored: set[str]) -> None:
        fields = (field for field in node.body if isinstance(field, ast.AnnAssign))
        for field in fields:
            name = field.target.id if isinstance(field.target, ast.Name) else ""
            if isinstance(field.value, ast.Constant) and name not in stored:
                self.options[name] = field.value.value

    def run(self, body: Sequence[ast.stmt], doubt: str = "") -> None:
        """Follow these statements; with a doubt, they may not be run."""
        for statement in body:
            match statement:
                case ast.Assign(targets=[target]):
                    self._assign(target, statement.value, doubt)
                case ast.AnnAssign(target=target, value=ast.expr() as value):
                    self._assign(target, value, doubt)
                case ast.AugAssign(target=ast.Name(id=name), op=ast.Add()):
                    more = self._marked(self.pieces(statement.value), doubt)
                    self.texts[name] = [*self.texts.get(name, []), *more]
                    self.values.pop(name, None)
                case ast.If():
                    self._branch(statement.test, statement.body, statement.orelse, doubt)
                case ast.Match():
                    self._match(statement, doubt)
                case ast.For() | ast.While() | ast.With() | ast.Try():
                    for inner in ("body", "orelse", "finalbody"):
                        self.run(getattr(statement, inner, []), doubt or _DECIDES)
                case _:
                    pass

    def _assign(self, target: ast.expr, value: ast.expr, doubt: str) -> None:
        if not isinstance(target, ast.Name):
            return
        pieces = self._marked(self.pieces(value), doubt)
        earlier_pieces = (
            [replace(piece, doubt=piece.doubt or doubt) for piece in self.texts.get(target.id, [])] if doubt else []
        )
        self.texts[target.id] = [*earlier_pieces, *pieces]
        self.values.pop(target.id, None)
        if not doubt:
            with suppress(_OpenError):
                self.values[target.id] = self._recorded(value)

    def _marked(self, pieces: Sequence[_Piece], doubt: str) -> list[_Piece]:
        return [
            replace(piece, doubt=piece.doubt or doubt, outside=tuple(dict.fromkeys((*piece.outside, *self.tested))))
            for piece in pieces
        ]

    def _branch(self, test: ast.expr, body: Sequence[ast.stmt], alternative: Sequence[ast.stmt], doubt: str) -> None:
        self.used.clear()
        try:
            branch = body if self.value(test) else alternative
        except _OpenError:
            self.run(body, doubt or _DECIDES)
            self.run(alternative, doubt or _DECIDES)
            return
        tested, self.tested = self.tested, (*self.tested, *self.used)
        self.run(branch, doubt)
        self.tested = tested

    def _match(self, statement: ast.Match, doubt: str) -> None:
        self.used.clear()
        try:
            subject = self.value(statement.subject)
            branch = next(
                (case for case in statement.cases if not case.guard and self._fits(case.pattern, subject)), None
            )
        except _OpenError:
            for case in statement.cases:
                self.run(case.body, doubt or _DECIDES)
            return
        tested, self.tested = self.tested, (*self.tested, *self.used)
        self.run(branch.body if branch is not None else [], doubt)
        self.tested = tested

    def _fits(self, pattern: ast.pattern, subject: Any) -> bool:
        match pattern:
            case ast.MatchValue(value=value):
                return bool(self.value(value) == subject)
            case ast.MatchOr(patterns=patterns):
                return any(self._fits(part, subject) for part in patterns)
            case ast.MatchSequence(patterns=patterns) if isinstance(subject, tuple):
                return len(patterns) == len(subject) and all(map(self._fits, patterns, subject))
            case ast.MatchAs(pattern=None):
                return True
        raise _OpenError

    def pieces(self, node: ast.expr) -> list[_Piece]:
        """The text of an expression; what cannot be read stands in it as `${...}`."""
        match node:
            case ast.BinOp(op=ast.Add()):
                return [*self.pieces(node.left), *self.pieces(node.right)]
            case ast.JoinedStr():
                return [piece for part in node.values for piece in self.pieces(part)]
            case ast.FormattedValue():
                return self.pieces(node.value)
            case ast.Name(id=name) if name in self.texts:
                return self.texts[name]
            case ast.Call(func=ast.Attribute(attr="strip", value=inner)):
                return self.pieces(inner)
            case ast.Call():
                return [_Piece(f"${{{_named(node.func) or 'call'}[@]}}", node.lineno)]
        try:
            value, outside = self._recorded(node), tuple(self.used)
        except _OpenError:
            shown = re.sub(r"[^\w.]+", "_", ast.unparse(node)).strip("_")
            return [_Piece(f"${{{shown}}}", node.lineno)]
        return [_Piece(str(value), node.lineno, outside=outside)]

    def _recorded(self, node: ast.expr) -> Any:
        """The value of an expression; `used` has the launcher's options in it."""
        self.used.clear()
        return self.value(node)

    def value(self, node: ast.expr) -> Any:
        """The value of an expression of literals. Raises `_OpenError` for any other."""
        match node:
            case ast.Constant():
                return node.value
            case ast.Name(id=name) if name in self.values:
                return self.values[name]
            case ast.Attribute(value=ast.Name(id="args" | "self"), attr=name) if name in self.options:
                self.used.append(name)
                return self.options[name]
            case ast.Tuple() | ast.List():
                return tuple(self.value(part) for part in node.elts)
            case ast.UnaryOp(op=ast.Not()):
                return not self.value(node.operand)
            case ast.BoolOp():
                return self._logic(node)
            case ast.IfExp():
                return self.value(node.body if self.value(node.test) else node.orelse)
            case ast.BinOp() if type(node.op) in _OPERATORS:
                return self._computed(node.op, node.left, node.right)
            case ast.Compare(ops=[sign], comparators=[right]) if type(sign) in _OPERATORS:
                return self._computed(sign, node.left, right)
            case ast.JoinedStr():
                return "".join(str(self.value(part)) for part in node.values)
            case ast.FormattedValue(conversion=-1, format_spec=None):
                return self.value(node.value)
        raise _OpenError

    def _logic(self, node: ast.BoolOp) -> Any:
        result: Any = None
        for part in node.values:
            result = self.value(part)
            if bool(result) == isinstance(node.op, ast.Or):
                break
        return result

    def _computed(self, sign: ast.AST, first: ast.expr, second: ast.expr) -> Any:
        try:
            return _OPERATORS[type(sign)](self.value(first), self.value(second))
        except (TypeError, ZeroDivisionError) as error:
            raise _OpenError from error


def _is_stored(node: ast.Attribute) -> bool:
    return isinstance(node.ctx, ast.Store)
