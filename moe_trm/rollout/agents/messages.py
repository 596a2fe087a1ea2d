"""Chat messages as a request has them, in one plain form: for the chat template, and to see that two are the same."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Message = dict[str, Any]
"""Keys `role`, `content` (a text), and where there are any `reasoning_content`, `tool_calls`, `tool_call_id`, `name`.

`arguments` of a tool call are what their JSON says; a text that is no JSON stays a text.
"""

_ROLES = ("system", "developer", "user", "assistant", "tool")


class BadMessageError(ValueError):
    """A message that no chat template can be given. The text says why."""


def plain(message: object) -> Message:
    """One message of a request in plain form, without null fields and labels of an answer (`refusal`, `annotations`).

    Raises `BadMessageError` for no message, an unknown role, or content that is no text.
    """
    if not isinstance(message, Mapping):
        raise BadMessageError(f"a message is an object, not a {type(message).__name__}")
    role = message.get("role")
    if role not in _ROLES:
        raise BadMessageError(f"the role of a message is one of {', '.join(_ROLES)}, not {role!r}")
    made: Message = {"role": role, "content": _text(message.get("content"))}
    for key in ("reasoning_content", "tool_call_id", "name"):
        if message.get(key) is not None:
            if not isinstance(message[key], str):
                raise BadMessageError(f"{key} of a message is a text")
            made[key] = message[key]
    if message.get("tool_calls"):
        if not isinstance(message["tool_calls"], list):
            raise BadMessageError("tool_calls of a message is a list")
        made["tool_calls"] = [_call(call) for call in message["tool_calls"]]
    return made


def check_results(messages: Sequence[Message]) -> None:
    """Raises `BadMessageError` for a result that names a call which no message before it has."""
    ids: set[str | None] = set()
    for message in messages:
        name = message.get("tool_call_id")
        # A call without an id may have any.
        if message["role"] == "tool" and name is not None and name not in ids and None not in ids:
            raise BadMessageError(f"a tool's result is of the call {name!r:.80}, which no message before it has")
        ids.update(call.get("id") for call in message.get("tool_calls", ()))


def alike(first: Message, second: Message) -> bool:
    """True for two messages that say the same, whatever reasoning and whatever ids of tool calls they have."""
    return _essence(first) == _essence(second)


def same_reasoning(first: Message, second: Message) -> bool:
    """True for two messages with the same reasoning, or none."""
    return first.get("reasoning_content") == second.get("reasoning_content")


def reads_as(answer: Message, message: Message) -> bool:
    """True when `message` has content, reasoning and calls of `answer`, apart from surrounding white space."""

    def stripped(message: Message) -> object:
        calls = _essence(message)[2]
        return message["content"].strip(), message.get("reasoning_content", "").strip(), calls

    return stripped(answer) == stripped(message)


def _essence(message: Message) -> tuple[object, ...]:
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    return message["role"], message["content"], calls, message.get("name")


def _text(content: object) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadMessageError(f"the content of a message is a text or a list of texts, not a {type(content).__name__}")
    for part in content:
        if not (isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise BadMessageError(f"only parts of type text can be given to the policy, not {kind!r}")
    return "".join(part["text"] for part in content)


def _call(call: object) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise BadMessageError("a tool call is an object with function.name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = function["arguments"]
    made = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return made | ({"id": call["id"]} if isinstance(call.get("id"), str) else {})
