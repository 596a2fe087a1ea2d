"""Parsers of tool calls and reasoning in the forms of the templates here, as a user would write them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

CALL = re.compile(r"\n?<tool_call>\n?(.*?)\n?</tool_call>", re.DOTALL)
DEEPSEEK_CALLS = re.compile(r"<\|calls\|>.*<\|callsend\|>", re.DOTALL)
DEEPSEEK_CALL = re.compile(r"<\|call\|>(.*?)<\|sep\|>(.*?)<\|callend\|>", re.DOTALL)
ANALYSIS = re.compile(r"<\|channel\|>analysis<\|message\|>(.*?)<\|end\|><\|start\|>assistant", re.DOTALL)
HARMONY_CALL = re.compile(
    r"(?: to=functions\.(\w+)<\|channel\|>commentary json"
    r"|<\|channel\|>commentary to=functions\.(\w+) <\|constrain\|>json)<\|message\|>(.*)",
    re.DOTALL,
)
"""In the template's form, and in that of the model."""

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


def harmony_reasoning(text: str) -> tuple[str, str]:
    found = ANALYSIS.match(text)
    rest = text[found.end() :] if found else text
    return found[1] if found else "", rest.removeprefix("<|channel|>final<|message|>")


def harmony(text: str, tools: Sequence[Mapping[str, Any]]) -> Found:
    found = HARMONY_CALL.fullmatch(text)
    if found is None:
        return text, []
    try:
        return "", [{"name": found[1] or found[2], "arguments": json.loads(found[3])}]
    except ValueError:
        return text, []
