"""OpenAI's chat completions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from moe_trm.rollout.agents.api_error import ApiError
from moe_trm.rollout.agents.dialects import openai_form
from moe_trm.rollout.agents.dialects.dialect import Body, Dialect, SessionFacts, event
from moe_trm.rollout.agents.messages import Message
from moe_trm.rollout.agents.parameters import (
    boolean,
    conversation,
    effective,
    request_options,
    tools_of,
    variables_of,
)
from moe_trm.rollout.agents.request import ChatRequest, Request
from moe_trm.rollout.agents.template import TemplateOptions, as_text
from moe_trm.rollout.agents.tree import Node
from moe_trm.tasks.tokens import Tokens

NAME = "chat"
LIMITS = ("max_tokens", "max_completion_tokens")
FIELDS = frozenset({"messages", "tools", "tool_choice", "stop", "stream_options", "logprobs", *LIMITS})
DONE = b"data: [DONE]\n\n"


def read(body: object, facts: SessionFacts) -> ChatRequest:
    """See `Dialect.read`."""
    fields = effective(body, FIELDS, facts.model_names)
    messages = fields.get("messages")
    if not isinstance(messages, list):
        raise ApiError(400, "messages is a list with at least one message", param="messages")
    tools = tools_of(openai_form.tools(fields), fields.get("tool_choice", "auto"), reads_calls=facts.reads_calls)
    options = request_options(
        fields, facts.params, NAME, FIELDS, limits=LIMITS, stop="stop", logprobs=boolean(fields, "logprobs")
    )
    return ChatRequest(conversation(messages, "messages"), TemplateOptions(tools, variables_of(fields)), options)


def write(node: Node, name: str, request: Request, tokens: Tokens) -> Body:
    """See `Dialect.write`."""
    assert node.answer.message is not None, "an answer to a chat has a message"
    message = for_client(node.answer.message)
    choice = {
        "index": 0,
        "message": message,
        "finish_reason": "tool_calls" if message.get("tool_calls") else node.turn.finish_reason,
        "logprobs": {"content": openai_form.logprobs(node, tokens)} if request.options.logprobs else None,
        "matched_stop": node.answer.stop or None,
    }
    return openai_form.head(node, name, "chat.completion") | {"choices": [choice], "usage": openai_form.usage(node)}


def events(body: Body, request: Request) -> Iterator[bytes]:
    """See `Dialect.events`."""
    [choice] = body["choices"]
    usage = request.options.stream_usage
    head = {key: value for key, value in body.items() if key not in ("choices", "usage")}
    head["object"] = "chat.completion.chunk"
    message = dict(choice["message"])
    calls = [{"index": index, **call} for index, call in enumerate(message.pop("tool_calls", None) or ())]
    deltas = [{"role": message.pop("role"), "content": ""}]
    deltas += [{key: value} for key, value in message.items() if value]
    deltas += [{"tool_calls": [call]} for call in calls]
    parts = [{"index": 0, "delta": delta, "finish_reason": None, "logprobs": None} for delta in deltas]
    parts.append({key: value for key, value in choice.items() if key != "message"} | {"delta": {}})
    for part in parts:
        yield event(head | {"choices": [part]} | ({"usage": None} if usage else {}))
    if usage:
        yield event(head | {"choices": [], "usage": body["usage"]})
    yield DONE


def for_client(message: Message) -> dict[str, Any]:
    """A message as clients know it: arguments are text, and content is null beside calls where there is none."""
    made: dict[str, Any] = {"role": message["role"], "content": message["content"]}
    if "reasoning_content" in message:
        made["reasoning_content"] = message["reasoning_content"]
    if message.get("tool_calls"):
        made["content"] = message["content"] or None
        made["tool_calls"] = [
            call | {"function": call["function"] | {"arguments": as_text(call["function"]["arguments"])}}
            for call in message["tool_calls"]
        ]
    return made


CHAT = Dialect(NAME, "chat/completions", "chatcmpl", read, write, events, openai_form.refusal)
