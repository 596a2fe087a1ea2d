"""Scoring of a task: a comparison in this process, or a user's function in other processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from moe_trm.tasks.reward_input import RewardInput


class Scorer(Protocol):
    """Gives samples their rewards. Implementations: `ComparisonReward`, `FunctionReward`."""

    async def start(self) -> None:
        """Load what is needed. Raises `ConfigError`."""

    async def __call__(self, sample: RewardInput) -> object:
        """A number, or a dict of named numbers. Raises `RecordRejected`."""

    async def close(self) -> None:
        """Release helper processes."""


class ComparisonReward:
    """`Scorer` of a pure function that takes no time, such as `exact_reward`."""

    def __init__(self, function: Callable[[RewardInput], float]) -> None:
        self._function = function

    async def start(self) -> None:
        """Nothing to load."""

    async def __call__(self, sample: RewardInput) -> float:
        return self._function(sample)

    async def close(self) -> None:
        """Nothing to release."""
