"""Parsers of tool calls and reasoning in the forms of the templates here, as a user would write them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

CALL = re.compile(r"\n?<tool_call>\n?(.*?)\n?</tool_call>", re.DOTALL)
DEEPSEEK_CALLS = re.compile(r"<\|calls\|>.*<\|callsend\|>", re.DOTALL)
DEEPSEEK_CALL = re.compile(r"<\|call\|>(.*?)<\|sep\|>(.*?)<\|callend\|>", re.DOTALL)

Found = tuple[str, list[dict[str, Any]]]


def hermes(text: str, tools: Sequence[Mapping[str, Any]]) -> Found:
    try:
        calls = [json.loads(found) for found in CALL.findall(text)]
    except ValueError:
        return text, []
    return CALL.sub("", text), [{"name": call["name"], "arguments": call["arguments"]} for call in calls]


def glm(text: str, tools: Sequence[Mapping[str, Any]]) -> Found:
    calls = []
    for found in CALL.findall(text):
        pairs = re.findall(r"<arg_key>(.*?)</arg_key>\n?<arg_value>(.*?)</arg_value>", found)
        calls.append({"name": found.split("\n")[0].strip(), "arguments": dict(pairs)})
    return CALL.sub("", text), calls


def deepseek(text: str, tools: Sequence[Mapping[str, Any]]) -> Found:
    calls = [{"name": name, "arguments": arguments} for name, arguments in DEEPSEEK_CALL.findall(text)]
    return DEEPSEEK_CALLS.sub("", text), calls


def think(text: str) -> tuple[str, str]:
    before, found, behind = text.partition("</think>")
    return (before.removeprefix("<think>"), behind) if found else ("", text)
