"""The protocol of a task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from moe_trm.tasks.reward_input import RewardInput
from moe_trm.tasks.tokens import Tokens
from moe_trm.types import Prompt


class Task(Protocol):
    """Prompts and rewards. Text becomes token ids here once, and token ids become text only to be scored or shown."""

    @property
    def tokens(self) -> Tokens:
        """The checkpoint's tokenizer, vocabulary size and stop tokens."""

    @property
    def reward_weights(self) -> Mapping[str, float]:
        """Weights of named rewards; a name that is not there has weight 1."""

    async def start(self) -> None:
        """Load what rewards need. Raises `ConfigError` for a reward function that cannot be loaded."""

    def train_prompts(self, step: int, count: int) -> list[Prompt]:
        """The prompts of a training step: a function of seed, step and count alone.

        A resumed run gets the same ones.
        """

    def eval_sets(self) -> Mapping[str, tuple[Prompt, ...]]:
        """Held-out prompts by the name of their set, `""` for the main one; the same for every seed and step.

        No set is empty.
        """

    async def reward(self, sample: RewardInput) -> object:
        """A number, or a dict of named numbers.

        Called through `moe_trm.tasks.rewards.score`, which checks it. Raises `RecordRejected`.
        """

    async def close(self) -> None:
        """Release helper processes."""
