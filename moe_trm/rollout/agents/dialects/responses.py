"""OpenAI's Responses.

An answer is a list of items here: reasoning, a message, calls. A request has them one by one, too. So the items of an
answer are put together again: reasoning, a second message, or an item that is no assistant's begins the next message.
A conversation comes whole, or as what follows `previous_response_id`.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

from moe_trm.rollout.agents.api_error import ApiError
from moe_trm.rollout.agents.dialects import openai_form
from moe_trm.rollout.agents.dialects.dialect import Body, Dialect, SessionFacts
from moe_trm.rollout.agents.dialects.response_events import events
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

NAME = "responses"
FIELDS = frozenset(
    {
        "input",
        "instructions",
        "previous_response_id",
        "store",
        "tools",
        "tool_choice",
        "max_output_tokens",
        "stream_options",
        "include",
        "text",
    }
)
SEALED, LOGPROBS = "reasoning.encrypted_content", "message.output_text.logprobs"
"""Values of `include`."""
TEXT_KINDS = ("input_text", "output_text", "reasoning_text", "text")

Item = Mapping[str, Any]


def read(body: object, facts: SessionFacts) -> ChatRequest:
    """See `Dialect.read`."""
    fields = effective(body, FIELDS, facts.model_names)
    items = fields.get("input")
    items = [{"role": "user", "content": items}] if isinstance(items, str) else items
    if not isinstance(items, list) or not all(isinstance(item, Mapping) for item in items):
        raise ApiError(400, "input is a text or a list of items", param="input")
    before = _before(fields, facts)
    head = [{"role": "system", "content": fields["instructions"]}] if "instructions" in fields else []
    messages = conversation([*head, *before, *_messages(items)], "input")
    include, ignored = _include(fields), _text_options(fields)
    options = request_options(
        fields,
        facts.params,
        NAME,
        FIELDS,
        limits=("max_output_tokens",),
        logprobs=LOGPROBS in include,
        also_ignored=ignored,
    )
    choice = fields.get("tool_choice", "auto")
    tools = tools_of(_tools(fields.get("tools", [])), choice, reads_calls=facts.reads_calls)
    template = TemplateOptions(tools, variables_of(fields))
    # Instructions hold for one request.
    kept = messages[len(head) :] if boolean(fields, "store", default=True) else None
    return ChatRequest(messages, template, options, kept=kept, seals_reasoning=SEALED in include)


def _before(fields: Mapping[str, Any], facts: SessionFacts) -> tuple[Message, ...]:
    """The conversation up to the answer that the request continues."""
    name = fields.get("previous_response_id")
    if name is None:
        return ()
    kept = facts.kept.get(name) if isinstance(name, str) else None
    if kept is None:
        text = f"no answer {name!r:.80} is stored in this session"
        raise ApiError(404, text, param="previous_response_id", code="previous_response_not_found")
    return kept


def _messages(items: list[Item]) -> list[Mapping[str, Any]]:
    made: list[dict[str, Any]] = []
    answer: dict[str, Any] | None = None
    for item in items:
        kind = item.get("type", "message")
        assistant = kind in ("reasoning", "function_call") or (kind == "message" and item.get("role") == "assistant")
        if not assistant:
            answer = None
            made.append(_from_outside(item, kind))
            continue
        if answer is None or kind == "reasoning" or (kind == "message" and ("tool_calls" in answer or answer["begun"])):
            answer = {"role": "assistant", "content": "", "begun": False}
            made.append(answer)
        if kind == "reasoning":
            answer["reasoning_content"] = _reasoning(item)
        elif kind == "message":
            answer |= {"content": _text(item.get("content"), "content"), "begun": True}
        else:
            answer.setdefault("tool_calls", []).append(_call(item))
    return [{name: value for name, value in message.items() if name != "begun"} for message in made]


def _from_outside(item: Item, kind: object) -> dict[str, Any]:
    """A message of the user or the system, or a tool's result."""
    if kind == "message":
        return {"role": item.get("role"), "content": _text(item.get("content"), "content")}
    if kind == "function_call_output":
        return {
            "role": "tool",
            "tool_call_id": _word(item, "call_id"),
            "content": _text(item.get("output"), "output"),
        }
    text = f"items of type {kind!r:.80} cannot be given to the policy"
    raise ApiError(400, text, param="input", code="unsupported_parameter")


def _reasoning(item: Item) -> str:
    """The reasoning as plain text where it has one, else its opaque form."""
    if item.get("content"):
        return _text(item["content"], "content")
    sealed = item.get("encrypted_content")
    if sealed is None:
        raise ApiError(400, "a reasoning item has content or encrypted_content", param="input")
    try:
        return base64.b64decode(sealed, validate=True).decode()
    except (binascii.Error, ValueError, TypeError) as error:
        raise ApiError(400, "encrypted_content is of no answer of this policy", param="input") from error


def _call(item: Item) -> dict[str, Any]:
    function = {"name": _word(item, "name"), "arguments": _word(item, "arguments")}
    return {"id": _word(item, "call_id"), "type": "function", "function": function}


def _text(content: object, name: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(400, f"{name} of an item is a text or a list of parts", param="input")
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in TEXT_KINDS:
            text = f"only parts of text can be given to the policy, not {kind!r:.80}"
            raise ApiError(400, text, param="input", code="unsupported_parameter")
    return "".join(_word(part, "text") for part in content)


def _word(item: Item, name: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise ApiError(400, f"{name} of an item of type {item.get('type')!r:.80} is a text", param="input")
    return value


def _tools(tools: object) -> list[Mapping[str, Any]]:
    if not isinstance(tools, list):
        raise ApiError(400, "tools is a list", param="tools")
    return [_tool(tool) for tool in tools]


def _tool(tool: object) -> Mapping[str, Any]:
    if not isinstance(tool, Mapping) or tool.get("type") != "function" or not isinstance(tool.get("name"), str):
        kind = tool.get("type") if isinstance(tool, Mapping) else type(tool).__name__
        raise ApiError(400, f"only tools of type function with a name can be used, not {kind!r:.80}", param="tools")
    described = {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
    return {"type": "function", "function": described}


def _include(fields: Mapping[str, Any]) -> list[str]:
    include = fields.get("include", [])
    if not isinstance(include, list) or not all(name in (SEALED, LOGPROBS) for name in include):
        raise ApiError(400, f"include has {SEALED!r} and {LOGPROBS!r} at most", param="include")
    return include


def _text_options(fields: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of options of `text` that have no effect. Raises `ApiError` for a grammar."""
    options = fields.get("text", {})
    if not isinstance(options, Mapping) or options.get("format") not in (None, {"type": "text"}):
        text = "a format of the text would sample from another distribution than the policy's; leave it out"
        raise ApiError(400, text, param="text", code="unsupported_parameter")
    return tuple(f"text.{name}" for name in sorted(map(str, options)) if name != "format")


def write(node: Node, name: str, request: Request, tokens: Tokens) -> Body:
    """See `Dialect.write`."""
    message = node.answer.message
    assert message is not None, "an answer to a chat has a message"
    assert isinstance(request, ChatRequest), "it was read as one"
    cut = node.turn.finish_reason == "length"
    status = "incomplete" if cut else "completed"
    reasoning, output = message.get("reasoning_content", ""), []
    if reasoning:
        output.append(_reasoning_item(reasoning, f"rs_{name}", seals=request.seals_reasoning))
    if message["content"] or not message.get("tool_calls"):
        values = openai_form.logprobs(node, tokens) if request.options.logprobs else []
        part = {"type": "output_text", "text": message["content"], "annotations": [], "logprobs": values}
        output.append(
            {"type": "message", "id": f"msg_{name}", "role": "assistant", "status": status, "content": [part]}
        )
    output += [_call_item(call, status) for call in message.get("tool_calls", ())]
    used, head = openai_form.usage(node), openai_form.head(node, name, "response")
    return head | {
        "created_at": head.pop("created"),
        "status": status,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "error": None,
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": {
            "input_tokens": used["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": used["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": _reasoning_tokens(node, reasoning, tokens)},
            "total_tokens": used["total_tokens"],
        },
    }


def _reasoning_item(reasoning: str, name: str, *, seals: bool) -> Body:
    return {
        "type": "reasoning",
        "id": name,
        "summary": [],
        "content": [{"type": "reasoning_text", "text": reasoning}],
        "encrypted_content": base64.b64encode(reasoning.encode()).decode() if seals else None,
        "status": "completed",
    }


def _call_item(call: Mapping[str, Any], status: str) -> Body:
    return {
        "type": "function_call",
        "id": f"fc_{call['id']}",
        "call_id": call["id"],
        "name": call["function"]["name"],
        "arguments": as_text(call["function"]["arguments"]),
        "status": status,
    }


def _reasoning_tokens(node: Node, reasoning: str, tokens: Tokens) -> int:
    """Sampled tokens up to the end of the reasoning."""
    end = node.answer.body.find(reasoning) + len(reasoning) if reasoning else 0
    seen = number = 0
    for piece in tokens.pieces(node.turn.tokens.tolist()) if end else ():
        if seen >= end:
            break
        seen, number = seen + len(piece), number + 1
    return number


RESPONSES = Dialect(NAME, "responses", "resp", read, write, events, openai_form.refusal)
