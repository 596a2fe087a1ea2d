"""Answers in the form of OpenAI's interface: whole, and as events of a stream."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from moe_trm.rollout.agents.messages import Message
from moe_trm.rollout.agents.request import MODEL, RequestOptions
from moe_trm.rollout.agents.template import as_text
from moe_trm.rollout.agents.tree import Node
from moe_trm.tasks.tokens import Tokens


def chat_completion(node: Node, name: str, asked: RequestOptions, tokens: Tokens) -> dict[str, Any]:
    """The answer `node` in the form of `/v1/chat/completions`, with `name` as its id."""
    assert node.answer.message is not None, "an answer to a chat has a message"
    message = for_client(node.answer.message)
    choice = {
        "index": 0,
        "message": message,
        "finish_reason": "tool_calls" if message.get("tool_calls") else node.turn.finish_reason,
        "logprobs": {"content": _logprobs(node, tokens)} if asked.logprobs else None,
        "matched_stop": _matched_stop(node),
    }
    return _head(node, name, "chat.completion") | {"choices": [choice], "usage": _usage(node)}


def completion(node: Node, name: str, asked: RequestOptions, tokens: Tokens) -> dict[str, Any]:
    """The answer of `/v1/completions`, as `chat_completion`."""
    choice: dict[str, Any] = {
        "index": 0,
        "text": node.answer.body,
        "finish_reason": node.turn.finish_reason,
        "logprobs": None,
        "matched_stop": _matched_stop(node),
    }
    if asked.logprobs:
        found = _logprobs(node, tokens)
        choice["logprobs"] = {
            "tokens": [one["token"] for one in found],
            "token_logprobs": [one["logprob"] for one in found],
            "top_logprobs": None,
            "text_offset": None,
        }
    return _head(node, name, "text_completion") | {"choices": [choice], "usage": _usage(node)}


def events(whole: dict[str, Any], *, usage: bool) -> Iterator[dict[str, Any]]:
    """`whole` as the events of a stream, without the last one (`[DONE]`)."""
    [choice] = whole["choices"]
    head = {key: value for key, value in whole.items() if key not in ("choices", "usage")}
    if "message" in choice:
        head["object"] = "chat.completion.chunk"
        message = dict(choice["message"])
        calls = [{"index": index, **call} for index, call in enumerate(message.pop("tool_calls", None) or ())]
        deltas = [{"role": message.pop("role"), "content": ""}]
        deltas += [{key: value} for key, value in message.items() if value]
        deltas += [{"tool_calls": [call]} for call in calls]
        said = [{"index": 0, "delta": delta, "finish_reason": None, "logprobs": None} for delta in deltas]
        parts = [*said, {key: value for key, value in choice.items() if key != "message"} | {"delta": {}}]
    else:
        parts = [choice]
    for part in parts:
        yield head | {"choices": [part]} | ({"usage": None} if usage else {})
    if usage:
        yield head | {"choices": [], "usage": whole["usage"]}


def models() -> dict[str, Any]:
    """The answer of `/v1/models`."""
    return {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "moe-trm"}]}


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


def weights_of(node: Node) -> str:
    """The weights that sampled the end of an answer, by the number of their push."""
    return f"weights-{int(node.turn.versions[-1])}"


def _matched_stop(node: Node) -> str | None:
    """The stop text of the request that ended the answer, as SGLang's servers say it."""
    return node.answer.stop or None


def _head(node: Node, name: str, kind: str) -> dict[str, Any]:
    now = int(time.time())
    return {"id": name, "object": kind, "created": now, "model": MODEL, "system_fingerprint": weights_of(node)}


def _usage(node: Node) -> dict[str, int]:
    prompt, sampled = len(node.context.token_ids), node.turn.num_sampled
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _logprobs(node: Node, tokens: Tokens) -> list[dict[str, Any]]:
    """Log-probs over the whole vocabulary at the run's temperature, of every sampled token."""
    pieces = tokens.pieces(node.turn.tokens.tolist())
    return [
        {"token": piece, "logprob": float(logprob), "bytes": list(piece.encode()), "top_logprobs": []}
        for piece, logprob in zip(pieces, node.turn.full_logprobs, strict=True)
    ]
