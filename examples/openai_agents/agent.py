"""The calculator of ../calculator as a tool of an agent of openai-agents, which knows nothing of MoE-TRM.

    672+39=                                    the user
    2+9=   [11]   ,7+3+1=   [11]   ,6+0+1=   [7]   #711

What stands in brackets are the tool's results. The framework keeps the messages and calls the tool.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from types import SimpleNamespace
from typing import Any

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

# Traces would go to OpenAI.
set_tracing_disabled(True)


@function_tool  # type: ignore[untyped-decorator]
def calculator(expression: str) -> str:
    """The value of a sum. A negative one is written the way the model borrows: its last digit, and a `b`."""
    value = sum(int(term) for term in re.findall(r"[+-]?\d+", expression))
    return str(value) if value >= 0 else f"{value % 10}b"


async def run(base_url: str, api_key: str, prompt: Any) -> None:
    """One sample. It returns nothing, so `task.reward` judges the last answer."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        agent = Agent(
            name="sums",
            tools=[calculator],
            model=OpenAIChatCompletionsModel(model="policy", openai_client=client),
            model_settings=ModelSettings(extra_args={"stop": ["="]}),
        )
        await Runner.run(agent, prompt.text)


if __name__ == "__main__":
    # The same agent as a program of its own, e.g. in another virtual environment: rollout.agent=[PYTHON, THIS FILE].
    with open(os.environ["MOE_TRM_PROMPT"], encoding="utf-8") as file:
        row = json.load(file)
    asyncio.run(run(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], SimpleNamespace(**row)))
