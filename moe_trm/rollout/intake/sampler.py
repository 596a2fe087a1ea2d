"""Production of one sample by an engine with intake processes, which have decoded its text when it arrives."""

from __future__ import annotations

from typing import Protocol

from moe_trm.rollout.engine import RolloutEngine
from moe_trm.rollout.sampler import rewarded
from moe_trm.rollout.single_turn import SingleTurn
from moe_trm.tasks.protocol import Task
from moe_trm.tasks.rewards import score
from moe_trm.types import Prompt, RolloutRecord, SamplingParams


class WritingEngine(RolloutEngine, Protocol):
    """An engine whose intake processes decode samples."""

    async def generate_written(
        self, prompt: Prompt, params: SamplingParams, *, sample_id: int, group_id: int
    ) -> tuple[RolloutRecord, tuple[str, str] | None]:
        """As `generate`, with the sample's text (`tasks.rewards.written_text`) where an intake process has made it."""


class WrittenTurn(SingleTurn):
    """`SingleTurn` for which intake processes make what the reward reads of a sample."""

    def __init__(self, engine: WritingEngine, task: Task, params: SamplingParams) -> None:
        super().__init__(engine, task, params)
        self._writing = engine

    async def sample(self, prompt: Prompt, *, sample_id: int, group_id: int) -> RolloutRecord:
        """See `Sampler.sample`."""
        record, written = await self._writing.generate_written(
            prompt, self._params, sample_id=sample_id, group_id=group_id
        )
        return rewarded(record, await score(self._task, prompt, record, written))
