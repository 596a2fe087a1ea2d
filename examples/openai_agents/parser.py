"""Form of the tool calls of the quickstart's model: an answer that ends in a sum, before an `=`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

SUM = re.compile(r"\d+(?:[+-]\d+)+$")


def calls(text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
    """The text in front of the sum, and the call (`agent.tool_parser`)."""
    match = SUM.search(text)
    if match is None:
        return text, []
    return text[: match.start()], [{"name": "calculator", "arguments": {"expression": match[0]}}]
