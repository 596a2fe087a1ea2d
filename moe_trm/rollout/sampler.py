"""Production of one sample, with its reward."""

from __future__ import annotations

from typing import Protocol

from moe_trm.tasks.rewards import Reward
from moe_trm.types import Prompt, RolloutRecord, SamplingParams


class Sampler(Protocol):
    """Makes one rewarded sample of a prompt."""

    async def sample(self, prompt: Prompt, *, sample_id: int, group_id: int) -> RolloutRecord:
        """The accepted record with its reward.

        Raises `RecordRejected`, whose reason is counted; anything else stops the run.
        """

    async def answer(self, prompt: Prompt, params: SamplingParams) -> RolloutRecord:
        """A rewarded sample for an evaluation, made with other parameters and without routes and masks.

        Raises as `sample` does.
        """

    def metrics(self) -> dict[str, float]:
        """Totals since the run began, of what only this way of making samples has."""
        return {}

    async def close(self) -> None:
        """Release helper processes."""


def rewarded(record: RolloutRecord, reward: Reward, prompt: Prompt | None = None) -> RolloutRecord:
    """The record with its reward, the reward's named parts, and the answer that `prompt` expects, in all its rows."""
    further = tuple(rewarded(row, reward, prompt) for row in record.further)
    expected = record.expected if prompt is None else prompt.answer
    return record.changed(reward=reward.total, reward_parts=reward.parts, expected=expected, further=further)
