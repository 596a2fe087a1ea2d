"""Parameters of requests, whatever the dialect: which there are, and what becomes of each.

The policy samples as the run says. A field that would only set the same thing to another value is overridden, and the
answer says so. A field that asks for something else than the policy's distribution is refused. A field that changes
nothing here is accepted, and named once in the log.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from moe_trm.rollout.agents.api_error import ApiError
from moe_trm.rollout.agents.messages import BadMessageError, Message, check_results, plain
from moe_trm.rollout.agents.request import RequestOptions
from moe_trm.rollout.agents.template import reserved_variables
from moe_trm.types import SamplingParams

MODEL = "policy"
"""Name of the policy. An agent that asks for another model would get the policy's words without knowing."""

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
        "truncation": ("disabled",),
        "background": (False,),
        "mcp_servers": ([],),
        "context_management": ({"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
    }
)
"""Fields that would change what is sampled, with the values that do not. Any other value is refused."""

IGNORED = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prediction",
        "reasoning_effort",
        "reasoning",
        "thinking",
        "verbosity",
        "max_tool_calls",
        "cache_control",
        "betas",
        "client_metadata",
        "inference_geo",
    }
)
"""Fields that change nothing here. A template may have a variable for some: `chat_template_kwargs` sets it."""

MAX_STOPS, MAX_STOP_BYTES = 32, 128
"""Stop texts of a request, and the length of each: what SGLang takes, whatever has to be escaped in them."""

COMMON = frozenset({"model", "stream", "chat_template_kwargs"})
"""Fields of every dialect that is effective."""


def effective(body: object, known: frozenset[str], model_names: Collection[str]) -> dict[str, Any]:
    """The fields that have a value; `known` are the dialect's fields, `model_names` the policy's names.

    Raises `ApiError` for a field that is unknown, asks for another distribution, or for another model.
    """
    if not isinstance(body, Mapping):
        raise ApiError(400, "a request is a JSON object")
    fields = {name: value for name, value in body.items() if value is not None}
    for name, value in fields.items():
        if name in known:
            continue
        if name in REFUSED:
            if not any(type(value) in _kinds(neutral) and value == neutral for neutral in REFUSED[name]):
                text = f"{name}={value!r:.80} would sample from another distribution than the policy's; leave it out"
                raise ApiError(400, text, param=name, code="unsupported_parameter")
        elif name not in COMMON | OF_THE_RUN.keys() | IGNORED:
            raise ApiError(400, f"unknown parameter {name!r:.80}", param=name[:80], code="unknown_parameter")
    if fields.get("model", MODEL) not in model_names:
        text = f"the model {fields['model']!r:.80} does not exist; here is only {MODEL!r}, the policy that is trained. "
        text += "If this is to mean the policy, add it to agent.model_names"
        raise ApiError(404, text, param="model", code="model_not_found")
    return fields


def _kinds(neutral: object) -> tuple[type, ...]:
    return (int, float) if isinstance(neutral, int) and not isinstance(neutral, bool) else (type(neutral),)


def request_options(
    fields: Mapping[str, Any],
    params: SamplingParams,
    dialect: str,
    known: frozenset[str],
    *,
    limits: tuple[str, ...],
    stop: str | None = None,
    logprobs: bool = False,
    also_ignored: tuple[str, ...] = (),
) -> RequestOptions:
    """Options that all dialects have.

    `known`: fields of the dialect. `limits`: those with a number of tokens; `stop`: the one with texts.
    """
    numbers = [_count(fields, name) for name in limits if name in fields]
    options = RequestOptions(
        max_tokens=min(numbers, default=None),
        stop=_stops(fields, stop) if stop is not None else (),
        logprobs=logprobs,
        stream=boolean(fields, "stream"),
        overridden=tuple(
            name for name, of_run in OF_THE_RUN.items() if fields.get(name, of_run(params)) != of_run(params)
        ),
        ignored=(*sorted(fields.keys() & IGNORED - known), *also_ignored),
        dialect=dialect,
    )
    return replace(options, stream_usage=_stream_usage(fields))


def _stops(fields: Mapping[str, Any], name: str) -> tuple[str, ...]:
    stop = fields.get(name, [])
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(text, str) and text for text in stop):
        raise ApiError(400, f"{name} is a text or a list of texts", param=name)
    if len(stop) > MAX_STOPS or any(len(text.encode("utf-8", "surrogatepass")) > MAX_STOP_BYTES for text in stop):
        text = f"at most {MAX_STOPS} stop texts of at most {MAX_STOP_BYTES} bytes each can be looked for"
        raise ApiError(400, text, param=name, code="unsupported_parameter")
    return tuple(stop)


def _stream_usage(fields: Mapping[str, Any]) -> bool:
    options = fields.get("stream_options", {})
    if not isinstance(options, Mapping):
        raise ApiError(400, "stream_options is an object", param="stream_options")
    return options.get("include_usage") is True


def boolean(fields: Mapping[str, Any], name: str, *, default: bool = False) -> bool:
    """A field that is true or false. Raises `ApiError`."""
    value = fields.get(name, default)
    if not isinstance(value, bool):
        raise ApiError(400, f"{name} is true or false", param=name)
    return value


def _count(fields: Mapping[str, Any], name: str) -> int:
    value = fields[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ApiError(400, f"{name} is a positive number", param=name)
    return value


def conversation(messages: list[Mapping[str, Any]], param: str) -> tuple[Message, ...]:
    """The messages of a request in plain form. Raises `ApiError` for one that no chat template can be given."""
    if not messages:
        raise ApiError(400, f"{param} has at least one message", param=param)
    try:
        made = tuple(plain(message) for message in messages)
        check_results(made)
    except BadMessageError as error:
        raise ApiError(400, str(error), param=param) from error
    return made


def tools_of(tools: list[Mapping[str, Any]], choice: object, *, reads_calls: bool) -> tuple[Mapping[str, Any], ...]:
    """Tools that the template is given. `choice`: `auto` or `none`. Raises `ApiError` for a forced call."""
    if choice not in ("auto", "none"):
        text = "a forced call would sample from another distribution than the policy's; tool_choice is auto or none"
        raise ApiError(400, text, param="tool_choice", code="unsupported_parameter")
    if choice == "none" or not tools:
        return ()
    if not reads_calls:
        text = "the run does not say how this model writes tool calls: set agent.tool_parser"
        raise ApiError(400, text, param="tools", code="unsupported_parameter")
    return tuple(tools)


def variables_of(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Variables of the template (`chat_template_kwargs`, in every dialect). Raises `ApiError`."""
    variables = fields.get("chat_template_kwargs", {})
    if not isinstance(variables, Mapping):
        raise ApiError(400, "chat_template_kwargs is an object", param="chat_template_kwargs")
    reserved = reserved_variables() if variables else ()
    for name, value in variables.items():
        if name in reserved or not isinstance(value, str | bool | int | float):
            text = f"{name!r:.80} is no variable that a request can set to {value!r:.80}"
            raise ApiError(400, text, param="chat_template_kwargs")
    return variables
