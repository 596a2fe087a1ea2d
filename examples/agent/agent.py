"""The calculator of ../calculator as an agent that knows nothing of MoE-TRM: a loop around the OpenAI client.

    672+39=                                    the prompt
    2+9=   [11]   ,7+3+1=   [11]   ,6+0+1=   [7]   #711

What stands in brackets comes from the tool. Every request sends the whole text so far.
"""

from __future__ import annotations

import re
from typing import Any

from openai import AsyncOpenAI

EXPRESSION = re.compile(r"(\d+(?:[+-]\d+)+)$")


async def run(base_url: str, api_key: str, prompt: Any) -> None:
    """One sample. It returns nothing, so `task.reward` judges the last answer."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        text = prompt.text
        while True:
            answer = await client.completions.create(model="policy", prompt=text, stop=["="])
            choice = answer.choices[0]
            # The server reports which stop text ended an answer, as SGLang's does.
            if (choice.model_extra or {}).get("matched_stop") != "=":
                return
            text += f"{choice.text}={calculate(choice.text)}"


def calculate(text: str) -> str:
    """The value of the sum that `text` ends in; `?` where it ends in none.

    A negative value is written the way the model borrows: its last digit, counted up from ten, and a `b`.
    """
    match = EXPRESSION.search(text)
    if match is None:
        return "?"
    value = sum(int(term) for term in re.findall(r"[+-]?\d+", match[1]))
    return str(value) if value >= 0 else f"{value % 10}b"
