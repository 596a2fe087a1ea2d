"""The error in the output of a server that ended, without the pages around it.

SGLang prints all of its arguments on one line, and before a wrong option all the options that it knows. What a user
needs is the last line of each traceback, or what comes after `error:`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

MOST_ERRORS = 3
"""Errors that are told, the last ones: what comes first may have passed, and what comes last may be a consequence."""
MOST_LINES = 8
"""Lines of one message, or of an output without any error."""
LONGEST_LINE = 400
TRACEBACK = "Traceback (most recent call last):"
CHAINED = ("The above exception was", "During handling of the above exception")
WRONG_OPTION = re.compile(r"^[\w. /-]+: error: ")
RAISED = re.compile(r"^(\w+\.)*\w*(Error|Exception|Interrupt|Exit|Failure|Warning)\b")
STAMP = re.compile(r"^\[\d{4}-")
ARGUMENTS = ("server_args=", "ServerArgs(", "usage: ", "server_args ")


def last_words(output: str) -> str:
    """The errors in `output`, at most three; where there is none, the last lines that are no arguments."""
    lines = output.splitlines()
    errors = [*dict.fromkeys(_errors(lines))]
    if errors:
        return "\n".join(errors[-MOST_ERRORS:])
    return _text([line for line in lines if not line.startswith(ARGUMENTS) and "server_args=" not in line])


def _errors(lines: Sequence[str]) -> Iterator[str]:
    """The message of each traceback, one per chain, and of each refused command line."""
    for number, line in enumerate(lines):
        if WRONG_OPTION.match(line):
            yield _text([line])
        elif line.rstrip().endswith(TRACEBACK) and (raised := _raised(lines, number + 1)):
            yield raised


def _raised(lines: Sequence[str], start: int) -> str:
    """The message under the traceback whose frames begin at `start`; empty where another one of its chain follows."""
    end = start
    while end < len(lines) and (not lines[end].strip() or lines[end][0].isspace()):
        end += 1
    message = []
    for line in lines[end:]:
        if STAMP.match(line) or line.rstrip().endswith(TRACEBACK) or line.startswith(CHAINED):
            break
        message.append(line)
    rest = lines[end + len(message) :]
    if not message or not RAISED.match(message[0]) or (rest and rest[0].startswith(CHAINED)):
        return ""
    while not message[-1].strip():
        message.pop()
    return _text(message[:MOST_LINES])


def _text(lines: Sequence[str]) -> str:
    return "\n".join(line[:LONGEST_LINE] for line in lines[-MOST_LINES:])
