"""Samples of one request, one answer and one reward."""

from __future__ import annotations

from typing import Any

from moe_trm.rollout.engine import RolloutEngine
from moe_trm.rollout.sampler import rewarded
from moe_trm.rollout.sessions.conversation import Conversation
from moe_trm.tasks.protocol import Task
from moe_trm.tasks.rewards import score
from moe_trm.types import Prompt, RolloutRecord, SamplingParams


class SingleTurn:
    """`Sampler` that asks the engine once; the task gives the reward."""

    def __init__(self, engine: RolloutEngine, task: Task, params: SamplingParams) -> None:
        self._engine, self._task, self._params = engine, task, params

    async def sample(self, prompt: Prompt, *, sample_id: int, group_id: int) -> RolloutRecord:
        """See `Sampler.sample`."""
        record = await self._engine.generate(prompt, self._params, sample_id=sample_id, group_id=group_id)
        return rewarded(record, await score(self._task, prompt, record), prompt)

    async def answer(self, prompt: Prompt, params: SamplingParams) -> RolloutRecord:
        """See `Sampler.answer`."""
        conversation = Conversation(prompt)
        pictures: dict[str, Any] = {"pictures": prompt.pictures} if prompt.pictures else {}
        conversation.add(await self._engine.turn(prompt.token_ids, params, bare=True, **pictures))
        record = conversation.record(sample_id=-1, group_id=-1, keep_changed=True)
        return rewarded(record, await score(self._task, prompt, record), prompt)

    def metrics(self) -> dict[str, float]:
        """See `Sampler.metrics`."""
        return {}

    async def close(self) -> None:
        """Nothing to release."""
