"""Situations in which a chat template may change what was said before, tried without a model.

For each, the template writes a conversation before an answer, up to the answer, and behind the next message. The ids of
a session go on where the last text begins with the one before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from moe_trm.errors import CheckpointError
from moe_trm.rollout.agents.messages import Message, plain
from moe_trm.rollout.agents.template import ChatTemplate, TemplateOptions

ANSWER, THOUGHT = "the-answer-itself", "the-thought-before-it"
TOOL = {
    "type": "function",
    "function": {"name": "look_up", "description": "", "parameters": {"type": "object", "properties": {}}},
}
DATES = ("%Y-%m-%d", "%d %b %Y", "%b %d, %Y", "%B %d, %Y", "%d %B %Y", "%d/%m/%Y", "%m/%d/%Y", "%Y%m%d")
"""Forms of today's date in templates."""
SHOWN = 40
"""Letters of a text that are shown where it changes."""


@dataclass(frozen=True)
class Situation:
    """One thing that happens in conversations, and what becomes of the ids.

    Attributes:
        name: the situation.
        why: why a session begins another branch there; empty where its ids go on.
    """

    name: str
    why: str = ""


def situations(template: ChatTemplate, *, tools: bool, thinks: bool) -> list[Situation]:
    """Every situation with its outcome. Raises `CheckpointError` where the template cannot write a message of the user.

    `tools`, `thinks`: the run reads tool calls, or reasoning, out of answers. Otherwise they are content.
    """
    return list(_tried(template, tools=tools, thinks=thinks))


def _tried(template: ChatTemplate, *, tools: bool, thinks: bool) -> Iterator[Situation]:
    answer: Message = {"role": "assistant", "content": ANSWER}
    thought = (
        answer | {"reasoning_content": THOUGHT}
        if thinks
        else answer | {"content": f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}"}
    )
    call = plain(
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "call00000", "function": {"name": "look_up", "arguments": f'{{"a": "{ANSWER}"}}'}}],
        }
    )
    question, result = _user("and now?"), {"role": "tool", "tool_call_id": "call00000", "content": "found"}
    none = TemplateOptions()
    yield _outcome("the user's next message", template, answer, question, none)
    yield _outcome("the user's next message behind thinking", template, thought, question, none)
    if tools:
        options_with_tool = TemplateOptions(tools=(TOOL,))
        yield _outcome("a tool's result", template, call, result, options_with_tool)
        if thinks:
            yield _outcome(
                "a tool's result behind thinking",
                template,
                call | {"reasoning_content": THOUGHT},
                result,
                options_with_tool,
            )
    yield Situation("midnight", _dated(template.render([_user("?")], none)))
    yield Situation("texts between answers", _reads_back(template))


def _outcome(
    name: str, template: ChatTemplate, answer: Message, message: Message, options: TemplateOptions
) -> Situation:
    asked = [_user("what?")]
    try:
        closed, opened = template.render(asked, options, opens_answer=False), template.render(asked, options)
        answered = template.render([*asked, answer], options, opens_answer=False)
        behind = template.render([*asked, answer, message], options)
    except CheckpointError as error:
        return Situation(name, f"the template cannot write it ({error.got or error.what})")
    if not answered.startswith(opened):
        opens = answered.startswith(closed)
        fact = "opens an answer otherwise than it writes it later" if opens else "changes what came before"
        return Situation(name, f"the template {fact}: {_change(opened, answered)}")
    if "reasoning_content" in answer and THOUGHT not in answered:
        return Situation(name, "the template never writes the reasoning of an answer")
    place = answered.rfind(ANSWER)
    if place < 0:
        return Situation(name, "the template does not write an answer as it is")
    end = place + len(ANSWER)
    thinks = "reasoning_content" in answer or "<think>" in answer["content"]
    # The policy may write an answer as the template does, or begin with its first word.
    forms = [answered[:end], *([opened + ANSWER] if answer["content"] == ANSWER and not thinks else [])]
    for kept in forms:
        if behind.startswith(kept):
            same_end = template.shared(answered[end:], behind[len(kept) :]) is not None
            return Situation(
                name, "" if same_end else "the template ends the last answer otherwise than an earlier one"
            )
    removed = thinks and THOUGHT not in behind
    fact = "removes earlier thinking" if removed else "changes what came before"
    return Situation(name, f"the template {fact}: {_change(answered[:end], behind)}")


def _dated(text: str) -> str:
    """The reason that `text` is another one tomorrow; empty where it is not."""
    today = datetime.now().astimezone()
    dates = [date for date in (today.strftime(form) for form in DATES) if date in text]
    return f"the template writes today's date ({dates[0]}): a conversation is cut at midnight" if dates else ""


def _reads_back(template: ChatTemplate) -> str:
    """The reason that new text becomes another text as ids; empty where it does not."""
    talk = [_user("what?"), {"role": "assistant", "content": ANSWER}, _user("and now?")]
    _, _, new = template.render(talk, TemplateOptions()).rpartition(ANSWER)
    got = template.decode(template.encode(new))
    return "" if got == new else f"the tokenizer reads them as other text: {_change(new, got)}"


def _change(first: str, second: str) -> str:
    """The place where two texts part, as both have it."""
    pairs = zip(first, second, strict=False)
    place = next((number for number, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
    start = max(0, place - SHOWN // 2)
    return f"{first[start : place + SHOWN // 2]!r} becomes {second[start : place + SHOWN // 2]!r}"


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def cut(situations_seen: Sequence[Situation]) -> list[Situation]:
    """The situations in which a session begins another branch."""
    return [situation for situation in situations_seen if situation.why]
