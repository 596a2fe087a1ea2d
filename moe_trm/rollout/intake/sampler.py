"""Production of one sample by an engine with intake processes, which have decoded its text when it arrives."""

from __future__ import annotations

from moe_trm.rollout.sampler import SingleTurn, rewarded
from moe_trm.rollout.server_engine import ServerEngine
from moe_trm.tasks.protocol import Task
from moe_trm.tasks.rewards import score
from moe_trm.types import Prompt, RolloutRecord, SamplingParams


class WrittenTurn(SingleTurn):
    """`SingleTurn`; what the reward reads of a sample is made beside the controller.

    Args:
        engine: who samples.
        task: gives the reward, in the processes where it always does.
        params: how the behaviour policy samples.
    """

    def __init__(self, engine: ServerEngine, task: Task, params: SamplingParams) -> None:
        super().__init__(engine, task, params)
        self._writing = engine

    async def sample(self, prompt: Prompt, *, sample_id: int, group_id: int) -> RolloutRecord:
        """See `Sampler.sample`."""
        record, written = await self._writing.generate_written(
            prompt, self._params, sample_id=sample_id, group_id=group_id
        )
        return rewarded(record, await score(self._task, prompt, record, written))
