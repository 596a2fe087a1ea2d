"""Anthropic's Messages.

One message of this interface may be several of a chat template: results of tools are messages of their own there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from moe_trm.rollout.agents.api_error import ApiError
from moe_trm.rollout.agents.dialects.dialect import Body, Dialect, SessionFacts, event
from moe_trm.rollout.agents.parameters import (
    MODEL,
    boolean,
    conversation,
    effective,
    request_options,
    tools_of,
    variables_of,
)
from moe_trm.rollout.agents.request import ChatRequest, Request
from moe_trm.rollout.agents.template import TemplateOptions
from moe_trm.rollout.agents.tree import Node
from moe_trm.tasks.tokens import Tokens

NAME = "messages"
FIELDS = frozenset(
    {"messages", "system", "tools", "tool_choice", "stop_sequences", "max_tokens", "output_config", "thread"}
)
NO_THREADS = "thread_unsupported_request"
"""Code of a refusal after which the package's own loop over tools goes on with whole histories."""
KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}
"""Types of errors by status, where they are not the type of their hundred."""
RAW_ARGUMENTS = "raw_arguments"
"""Only key of the input of a call whose arguments are no object; this interface has no other form for them."""

Block = Mapping[str, Any]
Chat = list[Mapping[str, Any]]
"""Messages as chat completions have them."""


def read(body: object, facts: SessionFacts) -> ChatRequest:
    """See `Dialect.read`."""
    fields = effective(body, FIELDS, facts.model_names)
    messages = fields.get("messages")
    if "thread" in fields:
        text = "conversations are not kept by this interface; send the whole history without `thread`"
        raise ApiError(400, text, param="thread", code=NO_THREADS)
    if not isinstance(messages, list) or not messages:
        raise ApiError(400, "messages is a list with at least one message", param="messages")
    made: Chat = []
    if "system" in fields:
        made.append({"role": "system", "content": _text(fields["system"], "system")})
    for message in messages:
        made += _chat(message)
    if made[-1]["role"] == "assistant":
        text = "the last message is the assistant's; the policy begins each of its answers itself"
        raise ApiError(400, text, param="messages", code="unsupported_parameter")
    choice = _choice(fields.get("tool_choice", {"type": "auto"}))
    tools = tools_of(_tools(fields.get("tools", [])), choice.pop("type"), reads_calls=facts.reads_calls)
    fields |= choice
    options = request_options(
        fields,
        facts.params,
        NAME,
        FIELDS,
        limits=("max_tokens",),
        stop="stop_sequences",
        also_ignored=_output_config(fields.get("output_config", {})),
    )
    return ChatRequest(conversation(made, "messages"), TemplateOptions(tools, variables_of(fields)), options)


def _chat(message: object) -> Chat:
    """One message as the chat messages that it is."""
    role = message.get("role") if isinstance(message, Mapping) else None
    if not isinstance(message, Mapping) or role not in ("user", "assistant", "system"):
        raise ApiError(400, f"the role of a message is user, assistant or system, not {role!r:.80}", param="messages")
    content = message.get("content")
    if role == "system":
        return [{"role": "system", "content": _text(content, "the content of a message")}]
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list) or not all(isinstance(block, Mapping) for block in blocks):
        raise ApiError(400, "the content of a message is a text or a list of blocks", param="messages")
    return _from_user(blocks) if role == "user" else [_from_assistant(blocks)]


def _from_user(blocks: list[Block]) -> Chat:
    results: Chat = []
    texts: list[Block] = []
    for block in blocks:
        if block.get("type") != "tool_result":
            texts.append(block)
            continue
        if texts:
            raise ApiError(400, "tool_result blocks come before text in a message", param="messages")
        content = _text(block.get("content", ""), "the content of a tool_result")
        results.append({"role": "tool", "tool_call_id": _word(block, "tool_use_id"), "content": content})
    if results and not texts:
        return results
    return [*results, {"role": "user", "content": _text(texts, "the content of a message")}]


def _from_assistant(blocks: list[Block]) -> Mapping[str, Any]:
    texts, thinking, calls = [], [], []
    for block in blocks:
        match block.get("type"):
            case "thinking":
                thinking.append(_word(block, "thinking"))
            case "tool_use":
                if not isinstance(block.get("input"), Mapping):
                    raise ApiError(400, "the input of a tool_use block is an object", param="messages")
                raw = block["input"].keys() == {RAW_ARGUMENTS}
                arguments = block["input"][RAW_ARGUMENTS] if raw else block["input"]
                function = {"name": _word(block, "name"), "arguments": arguments}
                calls.append({"id": _word(block, "id"), "type": "function", "function": function})
            case _:
                texts.append(block)
    made: dict[str, Any] = {"role": "assistant", "content": _text(texts, "the content of a message")}
    if thinking:
        made["reasoning_content"] = "".join(thinking)
    if calls:
        made["tool_calls"] = calls
    return made


def _text(content: object, place: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(400, f"{place} is a text or a list of blocks", param="messages")
    for block in content:
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind != "text":
            text = f"{place}: only blocks of type text can be given to the policy, not {kind!r:.80}"
            raise ApiError(400, text, param="messages", code="unsupported_parameter")
    return "".join(_word(block, "text") for block in content)


def _word(block: Block, name: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise ApiError(400, f"{name} of a {block.get('type')!r:.80} block is a text", param="messages")
    return value


def _tools(tools: object) -> Chat:
    if not isinstance(tools, list):
        raise ApiError(400, "tools is a list", param="tools")
    return [_tool(tool) for tool in tools]


def _tool(tool: object) -> Mapping[str, Any]:
    if not isinstance(tool, Mapping) or tool.get("type", "custom") not in (None, "custom"):
        kind = tool.get("type") if isinstance(tool, Mapping) else type(tool).__name__
        raise ApiError(400, f"only tools of the client's own can be used here, not {kind!r:.80}", param="tools")
    if not isinstance(tool.get("name"), str) or not isinstance(tool.get("input_schema"), Mapping):
        raise ApiError(400, "a tool has a name and an input_schema", param="tools")
    described = {"description": tool["description"]} if isinstance(tool.get("description"), str) else {}
    function = {"name": tool["name"], **described, "parameters": tool["input_schema"]}
    return {"type": "function", "function": function}


def _choice(choice: object) -> dict[str, Any]:
    """`type` of the choice, and `parallel_tool_calls` where it forbids or allows them."""
    if not isinstance(choice, Mapping):
        raise ApiError(400, "tool_choice is an object", param="tool_choice")
    made = {"type": choice.get("type")}
    if "disable_parallel_tool_use" in choice:
        made["parallel_tool_calls"] = not boolean(choice, "disable_parallel_tool_use")
    return made


def _output_config(config: object) -> tuple[str, ...]:
    """Names of options of the output that have no effect. Raises `ApiError` for the others, such as a grammar."""
    if not isinstance(config, Mapping) or config.keys() - {"effort"}:
        text = "an output_config with more than an effort would sample from another distribution than the policy's"
        raise ApiError(400, text, param="output_config", code="unsupported_parameter")
    return ("output_config.effort",) if config else ()


def write(node: Node, name: str, request: Request, tokens: Tokens) -> Body:
    """See `Dialect.write`. The signature of a thinking block is the name of its answer."""
    message = node.answer.message
    assert message is not None, "an answer to a chat has a message"
    content: list[Body] = []
    if "reasoning_content" in message:
        content.append({"type": "thinking", "thinking": message["reasoning_content"], "signature": name})
    if message["content"]:
        content.append({"type": "text", "text": message["content"]})
    content += [_tool_use(call) for call in message.get("tool_calls", ())]
    return {
        "id": name,
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": content,
        "stop_reason": _stop_reason(node),
        "stop_sequence": node.answer.stop or None,
        "usage": {
            "input_tokens": node.context.num_tokens,
            "output_tokens": node.turn.num_sampled,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
        },
    }


def _tool_use(call: Mapping[str, Any]) -> Body:
    arguments = call["function"]["arguments"]
    parsed = arguments if isinstance(arguments, Mapping) else {RAW_ARGUMENTS: arguments}
    return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": parsed}


def _stop_reason(node: Node) -> str:
    assert node.answer.message is not None, "an answer to a chat has a message"
    if node.answer.message.get("tool_calls"):
        return "tool_use"
    if node.answer.stop:
        return "stop_sequence"
    return "max_tokens" if node.turn.finish_reason == "length" else "end_turn"


def events(body: Body, request: Request) -> Iterator[bytes]:
    """See `Dialect.events`."""
    usage = body["usage"]
    opening = body | {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage | {"output_tokens": 0}}
    yield _event("message_start", {"message": opening})
    for index, block in enumerate(body["content"]):
        empty, deltas = _parts(block)
        yield _event("content_block_start", {"index": index, "content_block": empty})
        for delta in deltas:
            yield _event("content_block_delta", {"index": index, "delta": delta})
        yield _event("content_block_stop", {"index": index})
    stop = {"stop_reason": body["stop_reason"], "stop_sequence": body["stop_sequence"]}
    yield _event("message_delta", {"delta": stop, "usage": {"output_tokens": usage["output_tokens"]}})
    yield _event("message_stop", {})


def _parts(block: Body) -> tuple[Body, list[Body]]:
    """A block before its content, and its content as deltas."""
    match block["type"]:
        case "text":
            return block | {"text": ""}, [{"type": "text_delta", "text": block["text"]}]
        case "thinking":
            return block | {"thinking": "", "signature": ""}, [
                {"type": "thinking_delta", "thinking": block["thinking"]},
                {"type": "signature_delta", "signature": block["signature"]},
            ]
        case _:
            text = json.dumps(block["input"], ensure_ascii=False)
            return block | {"input": {}}, [{"type": "input_json_delta", "partial_json": text}]


def _event(kind: str, fields: Body) -> bytes:
    return event({"type": kind, **fields}, kind)


def count(num_tokens: int) -> Body:
    """See `Dialect.count`."""
    return {"input_tokens": num_tokens}


def refusal(error: ApiError) -> Body:
    """See `Dialect.refusal`. Clients recognise a conversation that is too long by the words of the message, and an
    interface without threads by its details.
    """
    kind = KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    too_long = "prompt is too long: " if error.code == "context_length_exceeded" else ""
    inner: Body = {"type": kind, "message": too_long + error.message, "param": error.param, "code": error.code}
    if error.code == NO_THREADS:
        inner["details"] = {"error_code": NO_THREADS, "unsupported": ["thread"]}
    return {"type": "error", "error": inner, "request_id": None}


MESSAGES = Dialect(NAME, "messages", "msg", read, write, events, refusal, count)
