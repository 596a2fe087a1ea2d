"""SGLang's own parsers of answers, by the names of its options `--tool-call-parser` and `--reasoning-parser`.

Importing SGLang takes seconds, so it is imported where a parser is asked for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from moe_trm.errors import ConfigError


def tool_parser(
    name: str, key: str
) -> Callable[[str, Sequence[Mapping[str, Any]]], tuple[str, Sequence[Mapping[str, Any]]]]:
    """SGLang's parser of tool calls called `name`.

    Raises `ConfigError`: no such parser, or SGLang cannot be imported here; `key` names the setting.
    """
    try:
        from sglang.srt.entrypoints.openai.protocol import Tool
        from sglang.srt.function_call.function_call_parser import FunctionCallParser
    except ImportError as error:
        raise _not_there(name, key, error) from error
    _check(name, key, FunctionCallParser.ToolCallParserEnum)

    def parse(text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, Sequence[Mapping[str, Any]]]:
        parser = FunctionCallParser([Tool(**tool) for tool in tools], name)
        readable = in_channels(text) if name == "gpt-oss" else text
        if not parser.has_tool_call(readable):
            return text, ()
        beside, calls = parser.parse_non_stream(readable)
        return beside or "", [{"name": call.name, "arguments": call.parameters} for call in calls]

    return parse


def in_channels(text: str) -> str:
    """A call of gpt-oss in the form that SGLang's parser reads.

    That one wants the header from `<|start|>` on, which is part of the prompt, and the recipient behind the channel.
    The template of gpt-oss writes the recipient in front.
    """
    channel_text = text if text.startswith("<|start|>") else f"<|start|>assistant{text}"
    return TEMPLATES_CALL.sub(r"<|start|>assistant<|channel|>commentary to=\1 <|constrain|>\2<|message|>", channel_text)


TEMPLATES_CALL = re.compile(r"<\|start\|>assistant to=(\S+?)<\|channel\|>commentary (\w+)<\|message\|>")


def reasoning_parser(name: str, key: str) -> Callable[[str], tuple[str, str]]:
    """SGLang's parser of reasoning called `name`. Raises as `tool_parser` does."""
    try:
        from sglang.srt.parser.reasoning_parser import ReasoningParser
    except ImportError as error:
        raise _not_there(name, key, error) from error
    _check(name, key, ReasoningParser.DetectorMap)

    def parse(text: str) -> tuple[str, str]:
        reasoning, content = ReasoningParser(model_type=name, stream_reasoning=False).parse_non_stream(text)
        return reasoning or "", content or ""

    return parse


def _check(name: str, key: str, choices: Mapping[str, object]) -> None:
    if name not in choices:
        raise ConfigError(
            "SGLang has no such parser",
            where=f"config key {key}",
            got=name,
            expected=", ".join(sorted(choices)),
        )


def _not_there(name: str, key: str, error: ImportError) -> ConfigError:
    return ConfigError(
        "SGLang's parsers cannot be imported here",
        where=f"config key {key}",
        got=f"{name}: {error}",
        expected="an installation of SGLang that this process can import",
        fix=(
            "Without CUDA set SGLANG_USE_CPU_ENGINE=1 in the environment of the run, or name a parser of your own "
            "(path/to/file.py:function)."
        ),
    )
