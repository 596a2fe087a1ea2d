"""The events of a stream of OpenAI's Responses, in their order."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

from moe_trm.rollout.agents.dialects.dialect import Body, event
from moe_trm.rollout.agents.request import Request

Fields = dict[str, Any]


def events(body: Body, request: Request) -> Iterator[bytes]:
    """See `Dialect.events`."""
    for number, (kind, fields) in zip(count(), _events(body), strict=False):
        yield event({"type": kind, "sequence_number": number, **fields}, kind)


def _events(body: Body) -> Iterator[tuple[str, Fields]]:
    started = body | {"status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield "response.created", {"response": started}
    yield "response.in_progress", {"response": started}
    for index, item in enumerate(body["output"]):
        place = {"output_index": index}
        yield "response.output_item.added", place | {"item": _empty(item)}
        yield from _content(item, place | {"item_id": item["id"]})
        yield "response.output_item.done", place | {"item": item}
    yield f"response.{body['status']}", {"response": body}


def _empty(item: Body) -> Body:
    inner: Fields = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
    return item | inner | {"status": "in_progress"}


def _content(item: Body, place: Fields) -> Iterator[tuple[str, Fields]]:
    if item["type"] == "function_call":
        arguments = item["arguments"]
        yield "response.function_call_arguments.delta", place | {"delta": arguments}
        yield "response.function_call_arguments.done", place | {"arguments": arguments, "name": item["name"]}
        return
    [part] = item["content"]
    kind, inner = part["type"], place | {"content_index": 0}
    more = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
    yield "response.content_part.added", inner | {"part": part | {"text": ""}}
    yield f"response.{kind}.delta", inner | {"delta": part["text"]} | more
    yield f"response.{kind}.done", inner | {"text": part["text"]} | more
    yield "response.content_part.done", inner | {"part": part}
