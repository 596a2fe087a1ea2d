"""A controller with a fake engine and a fake task: random valid records, without a model or a server."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from moe_trm.config.engines import EngineTraits
from moe_trm.config.schema import Config
from moe_trm.errors import RecordRejected, SyncError
from moe_trm.rollout.controller import RolloutController
from moe_trm.sync.manifest import WeightPush
from moe_trm.tasks import RewardInput
from moe_trm.tasks.protocol import Task
from moe_trm.tasks.tokens import Tokens
from moe_trm.types import Prompt, RolloutRecord, SampledTurn, SamplingParams, TrainBatch, TrainRow
from tests.unit.doubles import StandInEngine
from tests.unit.records import make_record

CONFIG = Config.model_validate(
    {
        "model": {"checkpoint": "unused"},
        "rollout": {"prompts_per_step": 4, "group_size": 4},
        "learner": {"minibatches": 2, "micro_batch_rows": 3},
    }
)


class FakeTokens(Tokens):
    """Ids as text, without a checkpoint."""

    def __init__(self) -> None:
        self.vocab_size, self.max_positions, self.stop_token_ids = 32, None, (2,)

    def decode(self, token_ids: Sequence[int]) -> str:
        return " ".join(map(str, token_ids))


class FakeTask(Task):
    tokens: Tokens = FakeTokens()
    reward_weights: Mapping[str, float] = {}

    async def start(self) -> None: ...

    def train_prompts(self, step: int, count: int) -> list[Prompt]:
        return [Prompt(f"{step}-{i}", (1, 5, 6, 7)) for i in range(count)]

    def eval_sets(self) -> Mapping[str, tuple[Prompt, ...]]:
        return {"": tuple(Prompt(f"eval-{i}", (1, 10 + i)) for i in range(4))}

    async def reward(self, sample: RewardInput) -> object:
        if not sample.finished:
            return 0.0
        if 31 in sample.completion_ids:
            raise RecordRejected("reward_error", "no reward for this")
        return float(sum(sample.completion_ids) % 2)

    async def close(self) -> None: ...


class FakeEngine(StandInEngine):
    """Random valid records; rejects what it is told to reject."""

    traits = EngineTraits()

    def __init__(self, reject: frozenset[int] = frozenset(), refuse_push: bool = False) -> None:
        self.reject, self.refuse_push, self.version, self.pushes = reject, refuse_push, 0, list[WeightPush]()

    async def generate(self, prompt: Prompt, params: SamplingParams, *, sample_id: int, group_id: int) -> RolloutRecord:
        await asyncio.sleep(0.001 * (sample_id % 3))
        if sample_id in self.reject:
            raise RecordRejected("route_rows", "payload cut short")
        record = make_record(
            sample_id=sample_id, group_id=group_id, num_sampled=3 + sample_id % 5, version=self.version
        )
        return replace(record, prompt_id=prompt.prompt_id, reward=None)

    async def turn(
        self, context: Sequence[int], params: SamplingParams, *, start: int = 0, bare: bool = False
    ) -> SampledTurn:
        """An evaluation's answer: right for prompts 0 to 2 of four, but that of prompt 2 is not finished."""
        assert bare
        tokens = np.array([4 if context[-1] == 13 else 3, 2], np.int32)
        nothing = np.zeros(2, np.float32)
        reason = "length" if context[-1] == 12 else "stop"
        return SampledTurn(tokens, nothing, nothing, np.full(2, self.version, np.int32), None, None, reason)

    async def load_weights(self, push: WeightPush) -> None:
        if self.refuse_push:
            raise SyncError("checksums differ")
        self.pushes.append(push)
        self.version = push.version

    async def release_memory(self) -> None: ...


def controller_with(engine: FakeEngine, config: Config = CONFIG) -> RolloutController:
    return RolloutController(config, engine, FakeTask(), SamplingParams())


def plan(engine: FakeEngine, config: Config = CONFIG, step: int = 1) -> list[TrainBatch]:
    async def go() -> list[TrainBatch]:
        controller = controller_with(engine, config)
        await controller.load_weights(WeightPush(0, "", ()))
        return await controller.plan(step, data_size=2)

    return asyncio.run(go())


def rows_of(shares: Sequence[TrainBatch]) -> list[TrainRow]:
    return [
        row for share in shares for mini in share.mini_batches for micro in mini.micro_batches for row in micro.rows
    ]
