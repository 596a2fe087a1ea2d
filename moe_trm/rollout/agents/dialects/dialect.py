"""A dialect: how the requests of one interface are read, and how its answers, events and refusals are written."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from moe_trm.rollout.agents.api_error import ApiError
from moe_trm.rollout.agents.messages import Message
from moe_trm.rollout.agents.parameters import MODEL
from moe_trm.rollout.agents.request import Request
from moe_trm.rollout.agents.tree import Node
from moe_trm.tasks.tokens import Tokens
from moe_trm.types import SamplingParams

Body = dict[str, Any]
"""JSON of an answer."""


@dataclass(frozen=True)
class SessionFacts:
    """Facts about the session that a request is read with.

    Attributes:
        params: the run's sampling.
        reads_calls: tool calls are found in answers.
        kept: conversations up to an answer, by the name of the answer.
        model_names: names of the policy.
    """

    params: SamplingParams
    reads_calls: bool
    kept: Mapping[str, tuple[Message, ...]]
    model_names: Collection[str] = (MODEL,)


@dataclass(frozen=True)
class Dialect:
    """One interface.

    Attributes:
        name: in reports.
        path: behind `/v1/`.
        prefix: of the names of answers.
        read: a body as a request. Raises `ApiError`.
        write: the answer in a node, with its name, as JSON.
        events: the same as the events of a stream.
        refusal: an error as JSON.
        count: the number of tokens of a request as JSON, at `PATH/count_tokens`; None: the interface has no such path.
    """

    name: str
    path: str
    prefix: str
    read: Callable[[object, SessionFacts], Request]
    write: Callable[[Node, str, Request, Tokens], Body]
    events: Callable[[Body, Request], Iterator[bytes]]
    refusal: Callable[[ApiError], Body]
    count: Callable[[int], Body] | None = None


def event(body: Mapping[str, Any], name: str | None = None) -> bytes:
    """One server-sent event."""
    head = f"event: {name}\n".encode() if name is not None else b""
    return head + b"data: " + msgspec.json.encode(body) + b"\n\n"
