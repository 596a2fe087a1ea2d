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


def rewarded(record: RolloutRecord, reward: Reward) -> RolloutRecord:
    """The record with its reward and the reward's named parts, in all its rows."""
    further = tuple(rewarded(row, reward) for row in record.further)
    return record.changed(reward=reward.total, reward_parts=reward.parts, further=further)
