"""Situations in which a chat template may change what was said, and answers in the words of each family's model."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from tests.unit.rollout.agents.talks import MODELS_CALL, Talk


@dataclass(frozen=True)
class Words:
    """Answers as the model of a template writes them. None: it has no such answers."""

    plain: str = "an answer\n\nof mine"
    call: str | None = None
    thought: str | None = None
    """The text in front of an answer."""
    thoughtful: str | None = None
    """An answer without a call behind a thought, where that is not the plain one."""


HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
GLM_CALL = "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
WORDS = {
    "chatml": Words(call=HERMES, thought="<think>\nso\n</think>\n\n"),
    "glm": Words(call=GLM_CALL),
    "glm45": Words(
        plain="\n<think></think>\nan answer",
        call=f"\n{GLM_CALL}",
        thought="\n<think>so</think>",
        thoughtful="\nan answer",
    ),
    "deepseek": Words(call='<|calls|><|call|>add<|sep|>{"a": 1}<|callend|><|callsend|>'),
    "harmony": Words(
        plain="<|channel|>final<|message|>an answer",
        call=f'{MODELS_CALL}<|message|>{{"a":1}}',
        thought="<|channel|>analysis<|message|>so<|end|><|start|>assistant",
    ),
    "mixtral": Words(),
    "thinking": Words(thought="so\n</think>\n\n"),
    "rewriting": Words(),
    "eager": Words(),
}
FAMILIES = {
    "Qwen3": "chatml",
    "GLM-4": "glm",
    "GLM-4.5": "glm45",
    "DeepSeek-V3": "deepseek",
    "DeepSeek-R1": "thinking",
    "gpt-oss": "harmony",
    "Mixtral": "mixtral",
    "one that rewrites its own beginning": "rewriting",
}
"""Rows of the table in docs/agents.md."""


def after_a_question(name: str) -> str:
    """Two plain answers, with a message of the user in between."""
    return _verdict(name, WORDS[name].plain, "user")


def after_a_tool(name: str) -> str:
    """A call, and the answer to its result."""
    return _verdict(name, WORDS[name].call, "tool")


def thinking_after_a_tool(name: str) -> str:
    """The same with a thought in front of the call."""
    words = WORDS[name]
    call = words.thought + words.call if words.thought is not None and words.call is not None else None
    return _verdict(name, call, "tool")


def thinking_after_a_question(name: str) -> str:
    """An answer with a thought, and the answer to the user's next message."""
    words = WORDS[name]
    text = words.plain if words.thoughtful is None else words.thoughtful
    return _verdict(name, words.thought + text if words.thought is not None else None, "user")


SITUATIONS: dict[str, Callable[[str], str]] = {
    "answers": after_a_question,
    "tool calls": after_a_tool,
    "thinking before a tool call": thinking_after_a_tool,
    "thinking before the user's next message": thinking_after_a_question,
}
"""Columns of the table in docs/agents.md."""


def _verdict(name: str, said: str | None, role: str) -> str:
    if said is None:
        return "-"
    talk = Talk(name, random.Random(0), edits=0.0)
    talk.history.append({"role": "user", "content": "1 + 1?"})
    message = talk.answer(said, ends=True)
    assert role != "tool" or message["tool_calls"][0]["function"]["name"] == "add"
    answered = {"tool_call_id": "call0"} if role == "tool" else {}
    talk.history.append({"role": role, "content": "go on", **answered})
    context = talk.context()
    assert (context.parent is None) is bool(context.cut)
    return "cut" if context.cut else "continued"
