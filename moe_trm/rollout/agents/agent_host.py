"""Hosts of agents: its function in a process of all agents, or a command line started for every sample."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from moe_trm.runtime.child import Answerer


class AgentHost(Protocol):
    """Runs agents. `moe_trm.runtime.functions.host.FunctionHost` is one, `moe_trm.rollout.agents.command_host` has
    another.
    """

    @property
    def place(self) -> str:
        """The agent's name in errors: file and line, or the command line."""

    async def start(self) -> object:
        """Load the agent, or look for its program. Raises `ConfigError`."""

    async def call(self, payload: Any, answers: Callable[[], Answerer]) -> Any:
        """Run the agent once on `payload` (`base_url`, `api_key`, `prompt`). `answers` is called at each of its
        beginnings.

        Returns its reward, or None where the task gives it. Raises `FunctionFailed`.
        """

    async def close(self) -> None:
        """End all agents."""
