"""Several servers in simulated time, each with a version of its own, and the learner's side of a run over them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from moe_trm.config.engines import EngineTraits
from moe_trm.config.schema import Config
from moe_trm.errors import RecordRejected
from moe_trm.rollout.controller import RolloutController
from moe_trm.step.arrivals import joined
from moe_trm.step.cadence import Cadence
from moe_trm.sync.manifest import WeightPush
from moe_trm.types import Prompt, RolloutRecord, SamplingParams, TrainBatch
from tests.unit.records import make_record
from tests.unit.rollout.fake_engine import FakeEngine, FakeTask


@dataclass
class Place:
    """One server."""

    version: int = 0
    running: int = 0
    updating: bool = False


@dataclass
class Faults:
    """Chances of what goes wrong with a sample, and how long the slowest token takes."""

    dies: float = 0.0
    refused: float = 0.0
    slowest_s: float = 1.0


class SimulatedFleet(FakeEngine):
    """Servers that drain before they load, at once or in turn. A sample whose server dies begins anew elsewhere.

    Args:
        lengths: tokens of a sample, by its number.
        interrupt: servers load at once, and what runs goes on under the new weights.

    Attributes:
        side_by_side: the most versions that were served at the same time.
        answers: what was given, by sample.
    """

    def __init__(
        self,
        servers: int,
        *,
        rolling: bool = False,
        interrupt: bool = False,
        push_s: float = 0.0,
        faults: Faults | None = None,
        lengths: Callable[[int], int] = lambda sample_id: 1 + sample_id % 5,
        chance: random.Random | None = None,
    ) -> None:
        super().__init__()
        self._places, self._rolling, self._push_s = [Place() for _ in range(servers)], rolling, push_s
        self._interrupt, self._faults, self._lengths, self._chance = (
            interrupt,
            faults,
            lengths,
            chance or random.Random(0),
        )
        self._changed = asyncio.Condition()
        self.side_by_side = 1
        self.answers: dict[int, RolloutRecord | RecordRejected] = {}

    async def generate(self, prompt: Prompt, params: SamplingParams, *, sample_id: int, group_id: int) -> RolloutRecord:
        num_sampled = self._lengths(sample_id)
        pace = 1.0 if self._faults is None else self._chance.uniform(0.01, self._faults.slowest_s)
        while (versions := await self._attempt(num_sampled, pace)) is None:
            await asyncio.sleep(0.5)
        if self._faults is not None and self._chance.random() < self._faults.refused:
            refusal = RecordRejected("route_rows", "cut short")
            self.answers[sample_id] = refusal
            raise refusal
        record = make_record(sample_id=sample_id, group_id=group_id, num_sampled=num_sampled)
        answer = replace(record, prompt_id=prompt.prompt_id, versions=np.array(versions, np.int32), reward=None)
        self.answers[sample_id] = answer
        return answer

    async def _attempt(self, num_sampled: int, pace: float) -> list[int] | None:
        """The version that sampled each token; None when the server died."""
        async with self._changed:
            await self._changed.wait_for(lambda: any(not place.updating for place in self._places))
            place = min((each for each in self._places if not each.updating), key=lambda each: each.running)
            place.running += 1
        begun, dies = place.version, self._faults is not None and self._chance.random() < self._faults.dies
        versions = []
        if dies or not self._interrupt:
            await asyncio.sleep(pace * num_sampled * (self._chance.random() if dies else 1.0))
            versions = [begun] * num_sampled
        while len(versions) < num_sampled:
            await asyncio.sleep(pace)
            versions.append(place.version)
        async with self._changed:
            place.running -= 1
            self._changed.notify_all()
        return None if dies else versions

    async def load_weights(self, push: WeightPush) -> None:
        if not self._rolling:
            await asyncio.gather(*(self._load(place, push.version) for place in self._places))
            return
        for place in self._places:
            await self._load(place, push.version)
            self.side_by_side = max(self.side_by_side, len({each.version for each in self._places}))

    async def _load(self, place: Place, version: int) -> None:
        async with self._changed:
            place.updating = True
            await self._changed.wait_for(lambda: self._interrupt or not place.running)
        await asyncio.sleep(self._push_s)
        async with self._changed:
            place.version, place.updating = version, False
            self._changed.notify_all()


class RepeatingEngine(FakeEngine):
    """Gives recorded answers again, each once the weights that sampled it were pushed, after any delay."""

    traits = EngineTraits(samples_live=False)

    def __init__(self, answers: dict[int, RolloutRecord | RecordRejected], chance: random.Random) -> None:
        super().__init__()
        self._answers, self._chance, self._pushed = answers, chance, asyncio.Event()

    async def generate(self, prompt: Prompt, params: SamplingParams, *, sample_id: int, group_id: int) -> RolloutRecord:
        await asyncio.sleep(self._chance.uniform(0, 3))
        answer = self._answers[sample_id]
        if isinstance(answer, RecordRejected):
            raise answer
        while answer.versions.max() > self.version:
            self._pushed.clear()
            await self._pushed.wait()
        return answer

    async def load_weights(self, push: WeightPush) -> None:
        await super().load_weights(push)
        self._pushed.set()


@dataclass
class Trained:
    """The learner's side of a run.

    Attributes:
        parts: of each step, as they came.
        ends_s: when each step's training ended.
    """

    parts: list[list[TrainBatch]] = field(default_factory=list)
    ends_s: list[float] = field(default_factory=list)

    @property
    def steps(self) -> list[TrainBatch]:
        """Each step as one batch."""
        return [joined(parts) for parts in self.parts]


async def train(
    config: Config, engine: FakeEngine, train_s: Sequence[float], *, stop_after: int | None = None
) -> Trained:
    """Take batches, train, push when it is due without waiting for the push before the last.

    `stop_after`: end after that step, and go on from its state with another controller.
    """
    controller = RolloutController(config, engine, FakeTask(), SamplingParams())
    found, clock = Trained(), asyncio.get_running_loop().time
    num_parts, steps = config.learner.minibatches if config.pipeline.stream else 1, config.train.steps
    cadence = Cadence(config.pipeline.push_every, 0, config.train.steps)
    await controller.load_weights(WeightPush(0, "", ()))
    loading = asyncio.ensure_future(asyncio.sleep(0))
    for step in range(1, steps + 1):
        parts = []
        for part in range(num_parts):
            [batch] = await controller.plan(step, 1, part)
            parts.append(batch)
            await asyncio.sleep(train_s[step - 1] / num_parts)
        found.parts.append(parts)
        found.ends_s.append(clock())
        if cadence.pushes(step):
            await loading
            loading = asyncio.ensure_future(controller.load_weights(WeightPush(step, "", ())))
            if not controller.overlaps:
                await loading
        if step == stop_after:
            await loading
            state = controller.state()
            await controller.close()
            controller = RolloutController(config, engine, FakeTask(), SamplingParams())
            controller.restore(state)
            cadence = Cadence(config.pipeline.push_every, step, config.train.steps)
            await controller.load_weights(WeightPush(step, "", ()))
    await loading
    await controller.close()
    return found


def records(batch: TrainBatch) -> list[RolloutRecord]:
    """All samples of a batch, in the order of its minibatches."""
    return [row.record for mini in batch.mini_batches for micro in mini.micro_batches for row in micro.rows]


def ages(batch: TrainBatch) -> np.ndarray:
    """Age of every token of a batch."""
    return batch.step - 1 - np.concatenate([record.versions for record in records(batch)])
