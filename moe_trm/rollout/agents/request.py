"""Requests in the one form that all dialects are read into."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moe_trm.rollout.agents.messages import Message
from moe_trm.rollout.agents.template import TemplateOptions


@dataclass(frozen=True)
class RequestOptions:
    """Options of a request beside its text.

    Attributes:
        max_tokens: of the answer; None: what the run allows.
        stop: texts that end the answer.
        stream: the answer goes out as server-sent events, with the usage at the end if `stream_usage`.
        overridden: fields that the run overrides.
        ignored: fields that have no effect.
        dialect: name of the interface, for the report.
    """

    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    stream: bool = False
    stream_usage: bool = False
    overridden: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    dialect: str = ""


@dataclass(frozen=True)
class ChatRequest:
    """A request for the next message of a conversation.

    Attributes:
        kept: messages that a later request may refer to by the name of the answer; None: it cannot.
        seals_reasoning: the client gets the reasoning in a second, opaque form that it can send back.
    """

    messages: tuple[Message, ...]
    template: TemplateOptions
    options: RequestOptions
    kept: tuple[Message, ...] | None = None
    seals_reasoning: bool = False


@dataclass(frozen=True)
class CompletionRequest:
    """A request to go on with a text."""

    prompt: str
    options: RequestOptions


Request = ChatRequest | CompletionRequest


def one_token_stops(stop: Sequence[str], encode: Callable[[str], Sequence[int]]) -> tuple[int, ...]:
    """The ids of those stop texts that are one token of the policy. The engine stops at these without reading text."""
    written = [encode(text) for text in stop]
    return tuple(ids[0] for ids in written if len(ids) == 1)
