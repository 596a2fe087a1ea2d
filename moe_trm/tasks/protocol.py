"""What a task is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from moe_trm.tasks.tokens import Tokens
from moe_trm.types import Prompt


class Task(Protocol):
    """Prompts and rewards. Text becomes token ids here once, and token ids become text only to be scored or shown."""

    @property
    def tokens(self) -> Tokens:
        """The checkpoint's tokenizer, vocabulary size and stop tokens."""

    def train_prompts(self, step: int, count: int) -> list[Prompt]:
        """The prompts of a training step: a function of seed, step and count alone, so a resumed run sees the same ones."""

    def eval_prompts(self) -> tuple[Prompt, ...]:
        """Held-out prompts, the same for every seed and step; () when there are none."""

    def reward(self, prompt: Prompt, token_ids: Sequence[int]) -> float:
        """Score of a finished answer, given without its stop token. Called through `moe_trm.tasks.rewards.score`, which guards it."""

    def close(self) -> None:
        """Release helper processes."""
