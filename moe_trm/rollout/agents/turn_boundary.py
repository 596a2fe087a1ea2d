"""The boundary after an answer: the text the template puts after it, and the proof that nothing before it changed.

The template writes the whole conversation of a request. Its text must begin with the text that the policy was given for
the answer. What follows must be the answer. The rest is new, and the only part that is tokenised.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moe_trm.rollout.agents.messages import Message, reads_as

Reader = Callable[[str], Message]
"""The message that a text of the policy is: content, reasoning, tool calls."""


@dataclass(frozen=True)
class TextAnswer:
    """One answer of the policy, as text.

    Attributes:
        message: the message that the client got; None for a completion.
        body: text of the sampled ids, without the token that ended it.
        end: text of that token; empty where a limit cut the answer. Where a stop text ended it: all sampled text from
            the stop text on.
        stop: the request's stop text that ended it; empty where there was none.
    """

    message: Message | None
    body: str
    end: str
    stop: str = ""

    @property
    def overruns(self) -> bool:
        """True where text behind the stop text was sampled. The client never saw it."""
        return bool(self.stop) and self.end != self.stop


@dataclass(frozen=True)
class TurnBoundary:
    """The text `rest` that is tokenised behind the sampled ids of an answer.

    `rewritten`: the template writes the answer in another form than the policy did, e.g. a call with other white space.
    The sampled ids stay.
    """

    rest: str
    rewritten: bool


def find_boundary(answer: TextAnswer, tail: str, closing: str | None, read: Reader) -> TurnBoundary | None:
    """The boundary of `answer` in `tail`, the template's text from its beginning on; None where that is another answer.

    `closing`: the template's text between an answer and the next message; None where that behind the last answer
    differs. `read` tells whether the template's form of the answer is the same message.
    """
    rest = tail.removeprefix(answer.body)
    # What the ids end in may be nothing that the client or the template knows.
    end_known = not answer.overruns and (closing is not None or not answer.end)
    if tail.startswith(answer.body):
        if answer.end and rest.startswith(answer.end):
            return TurnBoundary(rest.removeprefix(answer.end), rewritten=False)
        if end_known and rest.startswith(closing or "") and (closing or answer.body):
            return TurnBoundary(rest, rewritten=bool(answer.end))
    if answer.message is None:
        return None
    for mark in (answer.end, (closing or "") if end_known else ""):
        head, mark_found, behind = tail.partition(mark) if mark else (tail, "", "")
        if mark_found and _says(head, mark, answer.message, read):
            return TurnBoundary(behind if mark == answer.end else mark + behind, rewritten=True)
    return None


def _says(text: str, end: str, message: Message, read: Reader) -> bool:
    """True when the template's form of an answer is `message`. Some parsers want the token that ends a call."""
    return any(reads_as(message, read(form)) for form in (text, text + end))


def cut_at_stop(body: str, end: str, stops: Sequence[str]) -> tuple[str, str, str]:
    """Body, end and stop text of an answer that may have one of `stops` in it.

    An engine looks at text after whole tokens. So the last token may have text behind the stop text; and an answer that
    a weight push interrupted in the middle of a stop text goes on. Nothing that was sampled is left out: it is the end.
    """
    full_text = body + end
    hits = [
        (place, stop)
        for stop in stops
        if 0 <= (place := full_text.find(stop)) < len(body) or (place == len(body) and stop == end)
    ]
    if not hits:
        return body, end, ""
    place, stop = min(hits, key=lambda hit: hit[0])
    return full_text[:place], full_text[place:], stop
