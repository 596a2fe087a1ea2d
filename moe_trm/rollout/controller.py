"""The rollout controller: a training step's data from waiting groups to planned rows, and weights to the engine.

It lives in its own process beside the learner ranks (`rollout.service`), so that routes and masks of a whole step never
pass through a rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moe_trm.config.schema import Config
from moe_trm.config.task_rules import greedy_metric
from moe_trm.errors import ControllerError
from moe_trm.rollout.engine import RolloutEngine
from moe_trm.rollout.evaluation import Evaluator
from moe_trm.rollout.kept_sets import sampler_bounds
from moe_trm.rollout.producer import Producer
from moe_trm.rollout.sample_metrics import sample_metrics, time_metrics
from moe_trm.rollout.sampler import Sampler
from moe_trm.rollout.single_turn import SingleTurn
from moe_trm.rollout.step_parts import StepParts
from moe_trm.rollout.step_planner import StepPlanner
from moe_trm.rollout.step_recorder import StepRecorder
from moe_trm.rollout.store.ledger import Ledger
from moe_trm.rollout.store.metrics import age_metrics
from moe_trm.rollout.store.reuse import ReuseBuffer
from moe_trm.rollout.store.store import GroupStore
from moe_trm.rollout.text_bank import TextBank
from moe_trm.rollout.weight_loader import WeightLoader
from moe_trm.sync.manifest import Share, WeightPush
from moe_trm.tasks.prompts import PromptOrder
from moe_trm.tasks.protocol import Task
from moe_trm.types import SamplingParams, ServerState, TrainBatch


class RolloutController:
    """Owner of all that makes samples, on one page: what begins, what a step takes, and what it hands to the ranks.

    Not thread-safe: one event loop owns it. Without `sampler`, a sample is one request to the engine.
    """

    def __init__(
        self,
        config: Config,
        engine: RolloutEngine,
        task: Task,
        params: SamplingParams,
        sampler: Sampler | None = None,
        *,
        indexers: tuple[tuple[int, ...], int] | None = None,
    ) -> None:
        self._config, self._engine, self._task, self._params = config, engine, task, params
        self._sampler = sampler or SingleTurn(engine, task, params)
        self._evaluator = Evaluator(
            config.eval,
            self._sampler,
            task.eval_sets(),
            params,
            greedy_metric=greedy_metric(config.task, config.rollout),
            concurrency=config.rollout.concurrency,
        )
        rollout, eta = config.rollout, config.pipeline.staleness_limit
        self._ledger = Ledger()
        self._store = GroupStore(
            self._ledger, eta, refills=int((config.batch.refill_limit - 1) * rollout.prompts_per_step)
        )
        self._producer = Producer(
            self._sampler,
            PromptOrder(task, rollout.prompts_per_step),
            self._store,
            self._ledger,
            config.batch,
            batch_groups=rollout.prompts_per_step,
            group_size=rollout.group_size,
            concurrency=rollout.concurrency,
            bounds=sampler_bounds(config.rollout, config.sampling_mask) if config.keeps_masks else None,
            indexers=indexers,
        )
        self._reuse = ReuseBuffer(config.pipeline, self._ledger, config.seed)
        self._planner = StepPlanner(config)
        self._recorder = StepRecorder(config.record.bundle, rollout.group_size)
        self._bank = TextBank(config.probe, engine, config.seed)
        self._weights = WeightLoader(engine, self._admit, overlaps=self.overlaps)
        self._arrived = StepParts({}, ())

    @property
    def overlaps(self) -> bool:
        """True when samples are made while the learner trains."""
        return self._config.pipeline.mode != "sync"

    async def start(self) -> None:
        """Return when the engine has answered, and is the configured one. Raises `EngineError`."""
        await self._engine.start()

    @property
    def proves_tensors(self) -> bool:
        """False where a push can be proved by use alone, and every one needs texts."""
        return not self._engine.metrics().get("weights/unpredicted")

    def uses_bank(self, step: int) -> bool:
        """True on steps with fixed texts that the engine scores."""
        return self._config.probe.uses_bank(step)

    async def load_weights(self, push: WeightPush) -> None:
        """Give the engine the learner's new weights; raises `SyncError` when it cannot be proved that they arrived."""
        await self._weights.load(push)

    async def receive_weights(self, version: int, shares: Sequence[Share]) -> None:
        """The same by broadcast from the learner ranks, which send while this runs."""
        await self._weights.receive(version, shares)

    async def plan(self, step: int, data_size: int, part: int = 0) -> list[TrainBatch]:
        """One step: the oldest groups, once they are there, cut into one `TrainBatch` per data-parallel rank.

        With `pipeline.stream` it is one minibatch of the step. Parts are asked for in their order; one without any
        accepted sample has no minibatch, and the last one has the metrics of the step.
        """
        if not self.overlaps:
            self._producer.admit_steps(step)
        # The version is the learner's while it trains this step.
        version, last = step - 1, part == self._planner.parts - 1
        if part == 0:
            self._arrived = await self._begin(step, version)
        arrived = self._arrived
        groups = await self._producer.take(version, parts=self._planner.parts, ends_step=last)
        samples = self._planner.samples_of(groups, step)
        arrived.groups += groups
        arrived.samples += samples
        if last:
            self._recorder.write(step, arrived.groups, self._store.take_dropped())
            self._check_accepted(step, arrived)
        self._reuse.keep(groups)
        plan = self._planner.plan(step, samples, arrived.again[part :: self._planner.parts], data_size)
        arrived.add(plan.records, plan.minibatches)
        bank = await self._bank.scored(step, version, arrived.samples) if last else ()
        if last and self._config.rollout.colocate:
            await self._engine.release_memory()
        return plan.shares(self._metrics(version, arrived) if last else {}, bank)

    def servers(self) -> tuple[ServerState, ...]:
        """State of each rollout server now; none where the engine asks no servers."""
        return self._engine.servers() if self._engine.traits.has_servers else ()

    async def evaluate(self) -> Mapping[str, float]:
        """Metrics of the engine's present weights on the held-out prompts.

        Empty without such prompts, and where the engine has no weights.
        """
        return await self._evaluator.measure() if self._engine.traits.has_weights else {}

    def state(self) -> dict[str, Any]:
        """Everything a resumed run needs of the controller, as plain data.

        Samples in flight or waiting are given up and issued again.
        """
        ledger = self._ledger.settled()
        # A live engine does not give the same samples again: what may be used again is given up, too.
        reuse = [] if self._engine.traits.samples_live else self._reuse.state()
        return {"producer": self._producer.state(), "ledger": ledger, "reuse": reuse, "bank": self._bank.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue after `state`, before the first push."""
        self._producer.restore(**state["producer"])
        self._ledger.restore(state["ledger"])
        # Older checkpoints have neither.
        self._reuse.restore(state.get("reuse", []))
        self._bank.restore(state.get("bank", []))

    async def close(self) -> None:
        """Give up what is in flight and release engine and task."""
        await self._producer.close()
        await self._sampler.close()
        await self._task.close()
        await self._engine.close()

    def _admit(self, version: int) -> None:
        """Admit one more step's groups, eta steps ahead where sampling overlaps training.

        Elsewhere the step itself asks for them, unless it surely comes next: the ranks still close the step before.
        """
        train = self._config.train
        if self.overlaps:
            ahead = version + self._config.pipeline.staleness_limit + 1
        elif not (train.evaluates_after(version) or self._config.checkpoint.saves_after(version, train.steps)):
            ahead = version + 1
        else:
            return
        self._producer.admit_steps(min(ahead, train.steps))

    async def _begin(self, step: int, version: int) -> StepParts:
        """A step of which nothing has arrived, with the groups of earlier steps that it trains again."""
        # Without overlap what waits is of this very step, and how much is a matter of time.
        queue_ages = self._store.ages(version) if self.overlaps else {}
        for group_id in self._reuse.missing:
            self._reuse.put_back(await self._producer.again(group_id))
        return StepParts(queue_ages, self._reuse.draw(step, version))

    def _check_accepted(self, step: int, arrived: StepParts) -> None:
        if arrived.samples:
            return
        raise ControllerError(
            "no record of this step was accepted",
            where=f"step {step}",
            got={"rejected": dict(self._ledger.rejected), "dropped": dict(self._ledger.dropped)},
            expected="at least one accepted sample",
            fix="\n".join(["Mend what rejected them; the first of each reason:", *self._producer.examples.values()]),
        )

    def _metrics(self, version: int, arrived: StepParts) -> dict[str, float]:
        """Metrics of a step that has arrived whole."""
        if not self._ledger.balanced:
            raise ControllerError(
                "the sample ledger does not balance", got=self._ledger, expected="issued = sum of all places"
            )
        return {
            **sample_metrics(arrived.samples, self._params),
            **time_metrics(arrived.samples, *self._producer.clock.take(), self._weights.push_s),
            **self._engine.metrics(),
            **self._sampler.metrics(),
            **({"records/dropped/age": 0.0} if self.overlaps else {}),
            **self._ledger.metrics(),
            **self._reuse.metrics(),
            **self._bank.metrics(),
            **self._planner.balance(arrived.plan),
            **age_metrics(arrived.trained, version, arrived.queue_ages, self._config.pipeline.staleness_limit),
        }
