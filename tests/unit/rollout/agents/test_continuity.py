"""The doctor's words on a chat template against what becomes of sessions with it."""

from __future__ import annotations

from datetime import datetime

import pytest

from moe_trm.rollout.agents.continuity import Situation, situations
from moe_trm.rollout.agents.template import ChatTemplate
from tests.unit.rollout.agents.situations import SITUATIONS, WORDS
from tests.unit.rollout.agents.templates import CHATML, TemplateTokens, tokens_of

NAMES = {
    "answers": "the user's next message",
    "tool calls": "a tool's result",
    "thinking before a tool call": "a tool's result behind thinking",
    "thinking before the user's next message": "the user's next message behind thinking",
}


def found(name: str, *, tools: bool = True, thinks: bool = True) -> dict[str, Situation]:
    template = ChatTemplate(tokens_of(name))
    return {one.name: one for one in situations(template, tools=tools, thinks=thinks)}


@pytest.mark.parametrize("name", sorted(WORDS))
def test_a_verdict_on_a_template_is_what_sessions_do(name: str) -> None:
    outcomes = {title: situation(name) for title, situation in SITUATIONS.items()}
    judged = found(name)
    for title, outcome in outcomes.items():
        if outcome != "-":
            assert (outcome == "cut") is bool(judged[NAMES[title]].why), (title, judged[NAMES[title]])


@pytest.mark.parametrize(
    ("name", "situation", "why"),
    [
        ("chatml", "the user's next message behind thinking", "removes earlier thinking: "),
        ("glm45", "the user's next message behind thinking", "<think>the-thought"),
        ("thinking", "the user's next message", "opens an answer otherwise than it writes it later: "),
        ("harmony", "the user's next message", "ends the last answer otherwise"),
        ("rewriting", "the user's next message", "changes what came before: '<|im_start|>system\\n1 messages so far"),
        ("mixtral", "the user's next message behind thinking", "never writes the reasoning"),
        ("mixtral", "texts between answers", "the tokenizer reads them as other text"),
    ],
)
def test_the_reason_is_told(name: str, situation: str, why: str) -> None:
    assert why in found(name)[situation].why


def test_what_a_run_does_not_read_is_not_judged() -> None:
    names = found("chatml", tools=False, thinks=False)
    assert "a tool's result" not in names
    # Without a parser thinking is content, and the template removes it all the same.
    assert "removes earlier thinking" in names["the user's next message behind thinking"].why
    assert not names["the user's next message"].why


def test_a_date_is_found() -> None:
    dated = TemplateTokens(f"Today Date: {{{{ strftime_now('%d %b %Y') }}}}\n{CHATML}", "<|im_end|>")
    judged = {one.name: one for one in situations(ChatTemplate(dated), tools=False, thinks=False)}
    assert "today's date" in judged["midnight"].why
    assert str(datetime.now().astimezone().year) in judged["midnight"].why
    assert not found("chatml")["midnight"].why


def test_a_template_that_cannot_write_a_conversation_is_told() -> None:
    picky = TemplateTokens(
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
        "{{ m.content }}<|im_end|>{% endfor %}",
        "<|im_end|>",
    )
    judged = {one.name: one for one in situations(ChatTemplate(picky), tools=True, thinks=False)}
    assert "no tools here" in judged["a tool's result"].why
