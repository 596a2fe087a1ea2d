"""Common parts of OpenAI's interfaces: refusals, the head of answers, usage, log-probs, descriptions of tools."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from moe_trm.rollout.agents.api_error import ApiError
from moe_trm.rollout.agents.dialects.dialect import Body
from moe_trm.rollout.agents.parameters import MODEL
from moe_trm.rollout.agents.tree import Node
from moe_trm.tasks.tokens import Tokens

KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
"""Types of errors by status, where they are not the type of their hundred."""


def refusal(error: ApiError) -> Body:
    """A refusal as JSON."""
    kind = KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def head(node: Node, name: str, kind: str) -> Body:
    """Fields with which an answer begins. `system_fingerprint` names the weights that sampled its end."""
    return {
        "id": name,
        "object": kind,
        "created": int(time.time()),
        "model": MODEL,
        "system_fingerprint": f"weights-{int(node.turn.versions[-1])}",
    }


def usage(node: Node) -> dict[str, int]:
    """Tokens before an answer and of it."""
    prompt, sampled = node.context.num_tokens, node.turn.num_sampled
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def logprobs(node: Node, tokens: Tokens) -> list[dict[str, Any]]:
    """Log-probs over the whole vocabulary at the run's temperature, of every sampled token."""
    pieces = tokens.pieces(node.turn.tokens.tolist())
    return [
        {"token": piece, "logprob": float(logprob), "bytes": list(piece.encode()), "top_logprobs": []}
        for piece, logprob in zip(pieces, node.turn.full_logprobs, strict=True)
    ]


def tools(fields: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Descriptions of tools. Raises `ApiError`."""
    described = fields.get("tools", [])
    if not isinstance(described, list) or not all(_is_tool(tool) for tool in described):
        raise ApiError(400, "tools is a list of objects with type function and function.name", param="tools")
    return described


def _is_tool(tool: object) -> bool:
    function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)
