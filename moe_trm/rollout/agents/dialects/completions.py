"""OpenAI's text completions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from moe_trm.rollout.agents.api_error import ApiError
from moe_trm.rollout.agents.dialects import openai_form
from moe_trm.rollout.agents.dialects.chat import DONE
from moe_trm.rollout.agents.dialects.dialect import Body, Dialect, SessionFacts, event
from moe_trm.rollout.agents.parameters import effective, request_options
from moe_trm.rollout.agents.request import CompletionRequest, Request
from moe_trm.rollout.agents.tree import Node
from moe_trm.tasks.tokens import Tokens

NAME = "completions"
FIELDS = frozenset({"prompt", "stop", "stream_options", "logprobs", "max_tokens"})


def read(body: object, facts: SessionFacts) -> CompletionRequest:
    """See `Dialect.read`."""
    fields = effective(body, FIELDS, facts.model_names)
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
        [prompt] = prompt
    if not isinstance(prompt, str) or not prompt:
        raise ApiError(400, "prompt is one text; lists of texts and of ids are not taken", param="prompt")
    logprobs = fields.get("logprobs")
    if isinstance(logprobs, bool) or logprobs not in (None, 0, 1):
        raise ApiError(400, "only the log-prob of the sampled token is known: logprobs is 0 or 1", param="logprobs")
    options = request_options(
        fields, facts.params, NAME, FIELDS, limits=("max_tokens",), stop="stop", logprobs=logprobs is not None
    )
    return CompletionRequest(prompt, options)


def write(node: Node, name: str, request: Request, tokens: Tokens) -> Body:
    """See `Dialect.write`."""
    choice: dict[str, Any] = {
        "index": 0,
        "text": node.answer.body,
        "finish_reason": node.turn.finish_reason,
        "logprobs": None,
        "matched_stop": node.answer.stop or None,
    }
    if request.options.logprobs:
        values = openai_form.logprobs(node, tokens)
        choice["logprobs"] = {
            "tokens": [value["token"] for value in values],
            "token_logprobs": [value["logprob"] for value in values],
            "top_logprobs": None,
            "text_offset": None,
        }
    return openai_form.head(node, name, "text_completion") | {"choices": [choice], "usage": openai_form.usage(node)}


def events(body: Body, request: Request) -> Iterator[bytes]:
    """See `Dialect.events`."""
    head = {key: value for key, value in body.items() if key not in ("choices", "usage")}
    usage = request.options.stream_usage
    yield event(head | {"choices": body["choices"]} | ({"usage": None} if usage else {}))
    if usage:
        yield event(head | {"choices": [], "usage": body["usage"]})
    yield DONE


COMPLETIONS = Dialect(NAME, "completions", "cmpl", read, write, events, openai_form.refusal)
