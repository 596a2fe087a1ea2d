"""From the text of an answer to the message that a client gets: reasoning, content and tool calls apart."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from moe_trm.config.engines import NAMED_PARSERS
from moe_trm.errors import RecordRejected
from moe_trm.methods.load import load_function
from moe_trm.rollout.agents.messages import Message, plain

ToolParser = Callable[[str, Sequence[Mapping[str, Any]]], tuple[str, Sequence[Mapping[str, Any]]]]
"""Text and descriptions of tools to the text beside the calls, and the calls: `name`, `arguments`."""
ReasoningParser = Callable[[str], tuple[str, str]]
"""Text to reasoning and the rest."""


class AnswerReader:
    """Reads answers as the run's settings say.

    Args:
        tools: finds tool calls; None: requests with tools are refused.
        reasoning: finds reasoning; None: it stays in the content.
    """

    def __init__(self, tools: ToolParser | None = None, reasoning: ReasoningParser | None = None) -> None:
        self._tools, self._reasoning = tools, reasoning

    @property
    def reads_calls(self) -> bool:
        """True when tool calls can be found."""
        return self._tools is not None

    def __call__(self, text: str, tools: Sequence[Mapping[str, Any]]) -> Message:
        """The message. Text in which no call is found is content as a whole; nothing of it is left out.

        Raises:
            RecordRejected: `rollout_parser`, a parser that fails.
        """
        try:
            return self._read(text, tools)
        except Exception as error:
            # A parser may be the user's own, and raise anything.
            raise RecordRejected(
                "rollout_parser",
                "an answer cannot be read",
                got=f"{type(error).__name__}: {error} in {text!r:.200}",
                expected="reasoning, content and tool calls",
                fix="check agent.tool_parser and agent.reasoning_parser",
            ) from error

    def _read(self, text: str, tools: Sequence[Mapping[str, Any]]) -> Message:
        reasoning, content = self._apart(text)
        message: Message = {"role": "assistant", "content": content}
        if reasoning:
            message["reasoning_content"] = reasoning
        if tools and self._tools is not None:
            beside, calls = self._tools(content, tools)
            if calls:
                message["content"] = beside
                message["tool_calls"] = [{"function": _named(call)} for call in calls]
        return plain(message)

    def _apart(self, text: str) -> tuple[str, str]:
        """Reasoning and the rest. SGLang's parsers want no white space in front of reasoning; GLM-4.5 writes some."""
        if self._reasoning is None:
            return "", text
        stripped = text.lstrip()
        reasoning, content = self._reasoning(stripped)
        return (reasoning, content) if reasoning or content != stripped else ("", text)


def build_reader(tool_parser: str | None, reasoning_parser: str | None) -> AnswerReader:
    """The reader that `agent.tool_parser` and `agent.reasoning_parser` name.

    Raises `ConfigError` for a parser that is not known or cannot be loaded.
    """
    tools: ToolParser | None = None
    reasoning: ReasoningParser | None = None
    if tool_parser is not None:
        tools = _parser(tool_parser, "tool_parser", TOOLS_KEY)
    if reasoning_parser is not None:
        reasoning = _parser(reasoning_parser, "reasoning_parser", REASONING_KEY)
    return AnswerReader(tools, reasoning)


def _parser(name: str, kind: str, key: str) -> Callable[..., Any]:
    """The user's own, or the one of `NAMED_PARSERS` with this name."""
    if ":" in name:
        return load_function(name, key=key)
    parser: Callable[..., Any] = load_function(f"{NAMED_PARSERS}:{kind}", key=key)(name, key)
    return parser


TOOLS_KEY = "agent.tool_parser"
REASONING_KEY = "agent.reasoning_parser"


def _named(call: Mapping[str, Any]) -> dict[str, Any]:
    arguments = call["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {"name": call["name"], "arguments": arguments}
