"""Prompt of an agent (`rollout.agent`), and how its function is called. This file imports no engine.

async def run(base_url: str, api_key: str, prompt: AgentPrompt) -> None:
    client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
    await client.chat.completions.create(model="policy", messages=list(prompt.messages))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from moe_trm.errors import ConfigError
from moe_trm.runtime.child_service import Asker
from moe_trm.runtime.functions.hosted import FunctionSettings, Hosted, is_async

Agent = Callable[..., Any]
"""An async function, called with `base_url`, `api_key` and `prompt`.

It returns None, and the task gives the reward; or a number, or a dict of named numbers, which is the reward.
"""


@dataclass(frozen=True)
class AgentPrompt:
    """The prompt's row: `prompt_id` (its file and line, or its name), its `text` after the templates, the same as chat
    `messages` (a plain text is one message of the user), the expected `answer` (may be empty), and its `extra` fields.
    """

    prompt_id: str
    text: str
    messages: tuple[Mapping[str, str], ...]
    answer: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)


def adapt(function: Agent, settings: FunctionSettings) -> Hosted:
    """See `moe_trm.runtime.functions.hosted`. Raises `ConfigError` for a function that does not await."""
    if not is_async(function):
        raise ConfigError(
            "an agent is an async function: all agents of a run share one process",
            where=f"config key {settings.key}",
            got=f"{settings.function} is not an async function",
            expected="async def run(base_url, api_key, prompt)",
            fix="call what blocks with `await asyncio.to_thread(...)`",
        )

    async def call(payload: Any, ask: Asker) -> Any:
        row = payload["prompt"]
        prompt = AgentPrompt(**(row | {"messages": tuple(row["messages"])}))
        return await function(base_url=payload["base_url"], api_key=payload["api_key"], prompt=prompt)

    return Hosted(call)
