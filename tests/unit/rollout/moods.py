"""Users' rollouts that behave by the mood of their prompt: a task for them, and what becomes of each."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from moe_trm.errors import EngineError, RecordRejected
from moe_trm.rollout.agents.agent_sampler import AgentSampler
from moe_trm.rollout.sessions.function_sampler import FunctionSampler
from moe_trm.tasks import RewardInput
from moe_trm.tasks.protocol import Task
from moe_trm.types import Prompt, RolloutRecord

Outcomes = dict[str, RolloutRecord | RecordRejected]


class MoodTask(Task):
    """The reward of a sample is the number of its turns."""

    reward_weights: Mapping[str, float] = {"style": 4.0}

    def __init__(self, moods: Sequence[str] = ()) -> None:
        self.moods = moods
        self.seen: list[RewardInput] = []

    def train_prompts(self, step: int, count: int) -> list[Prompt]:
        return [prompt(self.moods[i]) for i in range(count)]

    def eval_sets(self) -> Mapping[str, tuple[Prompt, ...]]:
        return {}

    async def start(self) -> None: ...

    async def reward(self, sample: RewardInput) -> float:
        self.seen.append(sample)
        return float(sample.num_turns)

    async def close(self) -> None: ...


def prompt(mood: str) -> Prompt:
    return Prompt(mood, (5, 6, 7), f"be {mood}", extra={"mood": mood})


def together(
    maker: AgentSampler | FunctionSampler, moods: Sequence[str], seconds: float = 90.0
) -> tuple[Outcomes, Mapping[str, float]]:
    """The record of each, or its rejection, which names the sample, and the metrics; all at once."""

    async def one(number: int, mood: str) -> RolloutRecord | RecordRejected:
        try:
            return await maker.sample(prompt(mood), sample_id=number, group_id=number)
        except RecordRejected as rejection:
            return rejection

    async def go() -> tuple[Outcomes, Mapping[str, float]]:
        await maker.start()
        try:
            made = await asyncio.gather(*(one(number, mood) for number, mood in enumerate(moods)))
            for number, outcome in enumerate(made):
                assert not isinstance(outcome, RecordRejected) or f"sample {number}" in str(outcome)
            return dict(zip(moods, made, strict=True)), maker.metrics()
        finally:
            await maker.close()

    return asyncio.run(asyncio.wait_for(go(), seconds))


def reasons(found: Outcomes) -> dict[str, str]:
    """Those of the rejections."""
    return {mood: one.reason for mood, one in found.items() if isinstance(one, RecordRejected)}


async def lost(*_: object, **__: object) -> None:
    """In place of an engine's `turn`."""
    raise EngineError("the rollout server is not reachable")
