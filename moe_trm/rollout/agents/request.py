"""Requests as the interface takes them: which fields there are, and what becomes of each.

The policy samples as the run says. A field that would only set the same thing to another value is overridden, and the
answer says so. A field that asks for something else than the policy's distribution is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from moe_trm.rollout.agents.api_error import ApiError
from moe_trm.rollout.agents.messages import BadMessageError, Message, plain
from moe_trm.rollout.agents.template import TemplateOptions, reserved_variables
from moe_trm.types import SamplingParams

MODEL = "policy"
"""The only model there is: an agent that asks for another one would get the policy's words without knowing."""

OF_THE_RUN: Mapping[str, Callable[[SamplingParams], object]] = MappingProxyType(
    {
        "temperature": lambda params: params.temperature,
        "top_p": lambda params: params.top_p,
        "top_k": lambda params: params.top_k,
        "min_p": lambda params: params.min_p,
        "seed": lambda params: None,
        "parallel_tool_calls": lambda params: True,
    }
)
"""Fields that the run decides, with its value. Another value is overridden."""

REFUSED: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "n": (1,),
        "best_of": (1,),
        "frequency_penalty": (0,),
        "presence_penalty": (0,),
        "repetition_penalty": (1,),
        "logit_bias": ({},),
        "response_format": ({"type": "text"},),
        "top_logprobs": (0,),
        "echo": (False,),
        "suffix": ("",),
        "min_tokens": (0,),
        "ignore_eos": (False,),
        "modalities": (["text"],),
    }
)
"""Fields that would change what is sampled, with the values that do not. Any other value is refused."""

IGNORED = frozenset({"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"})
"""Fields that change nothing here."""

MAX_STOPS, MAX_STOP_BYTES = 32, 128
"""Stop texts of a request, and the length of each: what SGLang takes, whatever has to be escaped in them."""

COMMON = frozenset({"model", "stream", "stream_options", "stop", "max_tokens", "logprobs"})
CHAT = frozenset({"messages", "tools", "tool_choice", "max_completion_tokens", "chat_template_kwargs"})
COMPLETION = frozenset({"prompt"})


@dataclass(frozen=True)
class RequestOptions:
    """Options of a request beside its text.

    Attributes:
        max_tokens: of the answer; None: what the run allows.
        stop: texts that end the answer.
        stream: the answer goes out as server-sent events, with the usage at the end if `stream_usage`.
        overridden: fields that the run overrides.
    """

    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    stream: bool = False
    stream_usage: bool = False
    overridden: tuple[str, ...] = ()


@dataclass(frozen=True)
class ChatRequest:
    """A request for the next message of a conversation."""

    messages: tuple[Message, ...]
    options: TemplateOptions
    asked: RequestOptions


@dataclass(frozen=True)
class CompletionRequest:
    """A request to go on with a text."""

    prompt: str
    asked: RequestOptions


def read_chat(body: object, params: SamplingParams, *, reads_calls: bool) -> ChatRequest:
    """A request for `/v1/chat/completions`. `params`: the run's sampling. `reads_calls`: tool calls are found in
    answers.

    Raises `ApiError` for a field that is unknown, makes no sense, or asks for another distribution.
    """
    fields = _fields(body, CHAT | COMMON)
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError(400, "messages is a list with at least one message", param="messages")
    try:
        read = tuple(plain(message) for message in messages)
    except BadMessageError as error:
        raise ApiError(400, str(error), param="messages") from error
    options = TemplateOptions(_tools(fields, reads_calls=reads_calls), _variables(fields))
    logprobs = _boolean(fields, "logprobs")
    return ChatRequest(read, options, _asked(fields, params, logprobs=logprobs))


def read_completion(body: object, params: SamplingParams) -> CompletionRequest:
    """A request for `/v1/completions`. Raises as `read_chat` does."""
    fields = _fields(body, COMPLETION | COMMON)
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
        [prompt] = prompt
    if not isinstance(prompt, str) or not prompt:
        raise ApiError(400, "prompt is one text; lists of texts and of ids are not taken", param="prompt")
    logprobs = fields.get("logprobs")
    if isinstance(logprobs, bool) or logprobs not in (None, 0, 1):
        raise ApiError(400, "only the log-prob of the sampled token is known: logprobs is 0 or 1", param="logprobs")
    return CompletionRequest(prompt, _asked(fields, params, logprobs=logprobs is not None))


def _fields(body: object, known: frozenset[str]) -> dict[str, Any]:
    """The fields that have a value. Raises `ApiError`."""
    if not isinstance(body, Mapping):
        raise ApiError(400, "a request is a JSON object")
    fields = {name: value for name, value in body.items() if value is not None}
    for name, value in fields.items():
        if name in REFUSED:
            if not any(type(value) in _kinds(neutral) and value == neutral for neutral in REFUSED[name]):
                text = f"{name}={value!r:.80} would sample from another distribution than the policy's; leave it out"
                raise ApiError(400, text, param=name, code="unsupported_parameter")
        elif name not in known | OF_THE_RUN.keys() | IGNORED:
            raise ApiError(400, f"unknown parameter {name!r:.80}", param=name[:80], code="unknown_parameter")
    if fields.get("model", MODEL) != MODEL:
        text = f"the model {fields['model']!r:.80} does not exist; here is only {MODEL!r}, the policy that is trained"
        raise ApiError(404, text, param="model", code="model_not_found")
    return fields


def _kinds(neutral: object) -> tuple[type, ...]:
    return (int, float) if isinstance(neutral, int) and not isinstance(neutral, bool) else (type(neutral),)


def _asked(fields: Mapping[str, Any], params: SamplingParams, *, logprobs: bool) -> RequestOptions:
    limits = [_count(fields, name) for name in ("max_tokens", "max_completion_tokens") if name in fields]
    stop = fields.get("stop", [])
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(text, str) and text for text in stop):
        raise ApiError(400, "stop is a text or a list of texts", param="stop")
    if len(stop) > MAX_STOPS or any(len(text.encode("utf-8", "surrogatepass")) > MAX_STOP_BYTES for text in stop):
        text = f"at most {MAX_STOPS} stop texts of at most {MAX_STOP_BYTES} bytes each can be looked for"
        raise ApiError(400, text, param="stop", code="unsupported_parameter")
    stream_options = fields.get("stream_options", {})
    if not isinstance(stream_options, Mapping):
        raise ApiError(400, "stream_options is an object", param="stream_options")
    return RequestOptions(
        max_tokens=min(limits, default=None),
        stop=tuple(stop),
        logprobs=logprobs,
        stream=_boolean(fields, "stream"),
        stream_usage=stream_options.get("include_usage") is True,
        overridden=tuple(
            name for name, of_run in OF_THE_RUN.items() if fields.get(name, of_run(params)) != of_run(params)
        ),
    )


def _boolean(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name, False)
    if not isinstance(value, bool):
        raise ApiError(400, f"{name} is true or false", param=name)
    return value


def _count(fields: Mapping[str, Any], name: str) -> int:
    value = fields[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ApiError(400, f"{name} is a positive number", param=name)
    return value


def _tools(fields: Mapping[str, Any], *, reads_calls: bool) -> tuple[Mapping[str, Any], ...]:
    tools, choice = fields.get("tools", []), fields.get("tool_choice", "auto")
    if choice not in ("auto", "none"):
        text = "a forced call would sample from another distribution than the policy's; tool_choice is auto or none"
        raise ApiError(400, text, param="tool_choice", code="unsupported_parameter")
    if not isinstance(tools, list) or not all(_is_tool(tool) for tool in tools):
        raise ApiError(400, "tools is a list of objects with type function and function.name", param="tools")
    if choice == "none" or not tools:
        return ()
    if not reads_calls:
        text = "the run does not say how this model writes tool calls: set agent.tool_parser"
        raise ApiError(400, text, param="tools", code="unsupported_parameter")
    return tuple(tools)


def _is_tool(tool: object) -> bool:
    function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)


def _variables(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    variables = fields.get("chat_template_kwargs", {})
    if not isinstance(variables, Mapping):
        raise ApiError(400, "chat_template_kwargs is an object", param="chat_template_kwargs")
    reserved = reserved_variables() if variables else ()
    for name, value in variables.items():
        if name in reserved or not isinstance(value, str | bool | int | float):
            text = f"{name!r:.80} is no variable that a request can set to {value!r:.80}"
            raise ApiError(400, text, param="chat_template_kwargs")
    return variables


def one_token_stops(stop: Sequence[str], encode: Callable[[str], Sequence[int]]) -> tuple[int, ...]:
    """The ids of those stop texts that are one token of the policy. The engine stops at these without reading text."""
    written = [encode(text) for text in stop]
    return tuple(ids[0] for ids in written if len(ids) == 1)
