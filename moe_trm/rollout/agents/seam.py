"""The seam behind an answer: the text that the template puts after it, and the proof that nothing before it changed.

The template writes the whole conversation of a request. Its text must begin with the text that the policy was given for
the answer. What follows must be the answer. The rest is new, and the only part that is tokenised.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from moe_trm.rollout.agents.messages import Message, reads_as

Reader = Callable[[str], Message]
"""The message that a text of the policy is: content, reasoning, tool calls."""


@dataclass(frozen=True)
class Answer:
    """One answer of the policy, as text.

    Attributes:
        message: the message that the client got; None for a completion.
        body: text of the sampled ids, without the token that ended it.
        end: text of that token; empty where a limit cut the answer.
    """

    message: Message | None
    body: str
    end: str


@dataclass(frozen=True)
class Seam:
    """Text behind an answer.

    Attributes:
        rest: what is tokenised behind the sampled ids.
        rewritten: the template writes the answer in another form than the policy did, e.g. the same call with other
            white space. The sampled ids stay.
    """

    rest: str
    rewritten: bool


def find_seam(answer: Answer, tail: str, closing: str, read: Reader) -> Seam | None:
    """The seam of `answer` in `tail`, or None where the template writes another answer.

    Args:
        answer: as it was sampled.
        tail: the template's text from the beginning of the answer on.
        closing: the template's text between an answer and the next message.
        read: tells whether the template's form of the answer is the same message.
    """
    rest = tail.removeprefix(answer.body)
    if tail.startswith(answer.body):
        if answer.end and rest.startswith(answer.end):
            return Seam(rest.removeprefix(answer.end), rewritten=False)
        if rest.startswith(closing) and (closing or answer.body):
            return Seam(rest, rewritten=bool(answer.end))
    if answer.message is None:
        return None
    for mark in (answer.end, closing):
        head, found, behind = tail.partition(mark) if mark else (tail, "", "")
        if found and reads_as(answer.message, read(head)):
            return Seam(behind if mark == answer.end else mark + behind, rewritten=True)
    return None
