"""Form of the tool calls of the quickstart's model: an answer that ends in a sum, before an `=`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

SUM = re.compile(r"\d+(?:[+-]\d+)+$")


def calls(text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
    """The text in front of the sum, and the call (`agent.tool_parser`)."""
    found = SUM.search(text)
    if found is None:
        return text, []
    return text[: found.start()], [{"name": "calculator", "arguments": {"expression": found[0]}}]
