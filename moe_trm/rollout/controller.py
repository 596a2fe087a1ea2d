"""The rollout controller: a training step's data from waiting groups to planned rows, and weights to the engine.

It lives in its own process beside the learner ranks (`rollout.service`), so that routes and masks of a whole step never
pass through a rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from moe_trm.batch.advantages import Array, opob
from moe_trm.batch.filters import without_overlong
from moe_trm.batch.outcome import GDPO, advantages_by_part, baselines_of, explained_variance, outcome_advantages
from moe_trm.batch.plan import compares_groups, plan_metrics, plan_step
from moe_trm.batch.token_advantages import score_energy, token_advantages
from moe_trm.batch.train_rows import num_sampled, train_rows
from moe_trm.batch.zero_variance import shaped
from moe_trm.config.schema import Config
from moe_trm.config.task_rules import greedy_metric
from moe_trm.errors import ControllerError
from moe_trm.methods.advantages import ADVANTAGES, BY_TOKEN
from moe_trm.recording.bundle import BundleWriter
from moe_trm.rollout.engine import RolloutEngine
from moe_trm.rollout.evaluation import Evaluator, reward_of
from moe_trm.rollout.mask_metrics import mask_metrics
from moe_trm.rollout.producer import Producer
from moe_trm.rollout.sampler import Sampler, SingleTurn, rewarded
from moe_trm.rollout.step_parts import StepParts, versions_of
from moe_trm.rollout.turn_metrics import turn_metrics
from moe_trm.store.ledger import Ledger
from moe_trm.store.metrics import age_metrics
from moe_trm.store.reuse import Again, ReuseBuffer, with_weights
from moe_trm.store.store import Group, GroupStore
from moe_trm.sync.manifest import Share, WeightPush
from moe_trm.tasks.prompts import PromptOrder
from moe_trm.tasks.protocol import Task
from moe_trm.tasks.rewards import Reward
from moe_trm.types import MiniBatch, RolloutRecord, SamplingParams, ServerState, TrainBatch, TrainRow


class RolloutController:
    """Planner of steps from the producer's groups, which also evaluates and passes weights on.

    Not thread-safe: one event loop owns it.

    Args:
        config: the run's configuration.
        engine: where samples come from.
        task: prompts and rewards.
        params: how the behaviour policy samples.
        sampler: how one sample is made; none: one request to the engine.
    """

    def __init__(
        self,
        config: Config,
        engine: RolloutEngine,
        task: Task,
        params: SamplingParams,
        sampler: Sampler | None = None,
    ) -> None:
        self._config, self._engine, self._task, self._params = config, engine, task, params
        self._sampler = sampler or SingleTurn(engine, task, params)
        self._evaluator = Evaluator(
            config.eval, self._sampler, task.eval_sets(), params, greedy_metric=greedy_metric(config.task)
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
            needs_support=config.keeps_masks,
        )
        self._reuse = ReuseBuffer(config.pipeline, self._ledger, config.seed)
        self._writer = BundleWriter(config.record.bundle) if config.record.bundle else None
        self._whole_groups = compares_groups(config.loss, config.rollout, config.agent)
        # Parts in which a step is handed out.
        self._parts = config.learner.minibatches if config.pipeline.stream else 1
        self._arrived = StepParts({}, ())
        self._push_s = 0.0

    @property
    def overlaps(self) -> bool:
        """True when samples are made while the learner trains."""
        return self._config.pipeline.mode != "sync"

    @property
    def shares_memory(self) -> bool:
        """True when records may lie in memory that processes of this machine read (`runtime.shared_blocks`)."""
        return self._config.rollout.intake_processes > 0

    async def load_weights(self, push: WeightPush) -> None:
        """Give the engine the learner's new weights; raises `SyncError` when it cannot be proved that they arrived."""
        started = time.perf_counter()
        if self._engine.traits.awaits_weights and not self.overlaps:
            self._engine.expect(push.version)
            self._admit(push.version)
        await self._engine.load_weights(push)
        self._push_s = time.perf_counter() - started
        self._admit(push.version)

    async def receive_weights(self, version: int, shares: Sequence[Share]) -> None:
        """The same by broadcast from the learner ranks, which send while this runs."""
        started = time.perf_counter()
        await self._engine.receive_weights(version, shares)
        self._push_s = time.perf_counter() - started
        self._admit(version)

    async def plan(self, step: int, data_size: int, part: int = 0) -> list[TrainBatch]:
        """One step: the oldest groups, once they are there, cut into one `TrainBatch` per data-parallel rank.

        With `pipeline.stream` it is one minibatch of the step. Parts are asked for in their order; one without any
        accepted sample has no minibatch, and the last one has the metrics of the step.
        """
        if not self.overlaps:
            self._producer.admit_steps(step)
        version, last = step - 1, part == self._parts - 1  # the version is the learner's while it trains this step
        if part == 0:
            # Without overlap what waits is of this very step, and how much is a matter of time.
            queue_ages = self._store.ages(version) if self.overlaps else {}
            self._arrived = StepParts(queue_ages, await self._draw_again(step, version))
        arrived = self._arrived
        groups = await self._producer.take(version, parts=self._parts, ends_step=last)
        samples = [record for group in groups for record in group.kept]
        if self._config.task.shuffle_rewards:
            samples = _shuffle_rewards(samples, seed=self._config.seed, step=step)
        arrived.groups += groups
        arrived.samples += samples
        if last:
            self._record(step, arrived.groups)
            self._check_accepted(step, arrived)
        self._reuse.keep(groups)
        again = arrived.again[part :: self._parts]
        samples += [record for one in again for record in one.group.kept]
        rows = with_weights(self._rows(samples), again) if samples else []
        learner, packed = self._config.learner, self._config.batch.layout == "packed"
        plan = plan_step(
            rows,
            seed=self._config.seed,
            step=step,
            minibatches=learner.minibatches // self._parts,
            data_size=data_size,
            micro_batch_rows=learner.micro_batch_rows,
            micro_batch_tokens=learner.micro_batch_tokens,
            whole_groups=self._whole_groups,
            packed=packed,
        )
        if not rows:
            plan = [[] for _ in range(data_size)]
        records = [row.record for row in rows]
        arrived.add(records, plan)
        if last and self._config.rollout.colocate:
            await self._engine.release_memory()
        metrics = self._step_metrics(version, arrived) if last else {}
        versions = versions_of(records)
        return [TrainBatch(step, tuple(share), metrics, versions) for share in plan]

    def _balance(self, plan: Sequence[Sequence[MiniBatch]]) -> dict[str, float]:
        parallel = self._config.learner.parallel
        packed = self._config.batch.layout == "packed"
        return plan_metrics(plan, packed=packed, context=parallel.context, tensor=parallel.tensor)

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
        return {"producer": self._producer.state(), "ledger": ledger, "reuse": reuse}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue after `state`, before the first push."""
        self._producer.restore(**state["producer"])
        self._ledger.restore(state["ledger"])
        self._reuse.restore(state.get("reuse", []))  # older checkpoints have none

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

    async def _draw_again(self, step: int, version: int) -> list[Again]:
        """Groups of earlier steps that this one trains again."""
        for group_id in self._reuse.missing:
            self._reuse.put_back(await self._producer.again(group_id))
        return self._reuse.draw(step, version)

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

    def _step_metrics(self, version: int, arrived: StepParts) -> dict[str, float]:
        """Metrics of a step that has arrived whole."""
        bound = self._config.pipeline.staleness_limit
        ages = age_metrics(arrived.trained, version, arrived.queue_ages, bound)
        return self._metrics(arrived.samples) | self._balance(arrived.plan) | ages

    def _rows(self, samples: Sequence[RolloutRecord]) -> list[TrainRow]:
        """The rows of the samples with their advantages."""
        settings = self._config.advantage
        if settings.name not in BY_TOKEN:
            advantages = without_overlong(samples, self._advantages(samples), self._config.batch)
            both = zip(samples, advantages, strict=True)
            rows = [row for sample, value in both for row in train_rows(sample, float(value))]
            return shaped(rows, settings.zero_variance_scale, self._config.batch)
        found = token_advantages(
            settings.name,
            samples,
            lone=settings.lone_sample,
            normalize_std=settings.normalize_std,
            discount=settings.turn_discount,
        )
        trains = without_overlong(samples, np.ones(len(samples)), self._config.batch)
        values = [(own * factor).astype(np.float32) for own, factor in zip(found, trains, strict=True)]
        return [row for sample, own in zip(samples, values, strict=True) for row in train_rows(sample, own)]

    def _advantages(self, records: Sequence[RolloutRecord]) -> Array:
        """Of each sample."""
        settings, groups = self._config.advantage, np.array([record.group_id for record in records])
        num_tokens = np.array([num_sampled(record) for record in records])
        if settings.name == GDPO:
            return advantages_by_part(
                [record.reward_parts for record in records],
                groups,
                self._config.task.reward_weights,
                num_tokens,
                lone=settings.lone_sample,
            )
        rewards = np.array([record.reward for record in records], np.float64)
        if ADVANTAGES[settings.name].reads_ratios:  # the learner makes them anew, once it has scored the step
            energies = np.array([score_energy(record).sum() for record in records])
            return opob(rewards, groups, np.zeros(len(records)), energies, lone=settings.lone_sample or "zero")
        return outcome_advantages(
            settings.name,
            rewards,
            groups,
            num_tokens,
            normalize_std=settings.normalize_std,
            lone=settings.lone_sample,
            baselines=baselines_of(records) if ADVANTAGES[settings.name].reads_greedy else None,
        )

    def _record(self, step: int, groups: Sequence[Group]) -> None:
        """Write what this step took, and what was dropped since the last: a repeated run drops it again."""
        dropped = self._store.take_dropped()
        if self._writer is None:
            return
        size = self._config.rollout.group_size
        outcomes = {
            group.group_id * size + index: outcome
            for group in sorted([*groups, *dropped], key=lambda group: group.group_id)
            for index, outcome in enumerate(group.outcomes)
        }
        accepted = [outcome for outcome in outcomes.values() if not isinstance(outcome, str)]
        rejected = {number: outcome for number, outcome in outcomes.items() if isinstance(outcome, str)}
        self._writer.write(step, accepted, rejected)

    def _metrics(self, records: Sequence[RolloutRecord]) -> dict[str, float]:
        """Metrics of the samples that a step trains."""
        busy_s, idle_s = self._producer.clock.take()
        rewards = np.array([record.reward for record in records])
        lengths = np.array([num_sampled(record) for record in records])
        groups = np.array([record.group_id for record in records])
        spread = [np.ptp(rewards[groups == group]) for group in np.unique(groups)]
        if not self._ledger.balanced:
            raise ControllerError(
                "the sample ledger does not balance", got=self._ledger, expected="issued = sum of all places"
            )
        return {
            "reward/mean": float(rewards.mean()),
            "reward/zero_variance_groups": float(np.mean(np.array(spread) == 0)),
            **explained_variance(rewards, groups),
            "response/length_mean": float(lengths.mean()),
            "response/length_max": float(lengths.max()),
            "response/finished_fraction": float(np.mean([record.finish_reason == "stop" for record in records])),
            **({"rollout/tokens_per_s": float(lengths.sum() / busy_s)} if busy_s else {}),
            "time/rollout_s": busy_s,
            "time/rollout_idle_s": idle_s,
            "time/rollout_idle_share": idle_s / (busy_s + idle_s),
            "time/push_s": self._push_s,
            **self._engine.metrics(),
            **self._sampler.metrics(),
            **turn_metrics(records),
            **mask_metrics([row for record in records for row in record.rows], self._params),
            **({"records/dropped/age": 0.0} if self.overlaps else {}),
            **self._ledger.metrics(),
            **self._reuse.metrics(),
        }


def _shuffle_rewards(records: Sequence[RolloutRecord], *, seed: int, step: int) -> list[RolloutRecord]:
    order = np.random.default_rng((seed, step, 1)).permutation(len(records))
    return [
        rewarded(record, Reward(reward_of(records[i]), records[i].reward_parts))
        for record, i in zip(records, order, strict=True)
    ]


def rank_share(
    batch: TrainBatch, layer_ids: Sequence[int], lent: Callable[[np.ndarray], object] = lambda array: None
) -> TrainBatch:
    """`batch` with only the route layers that its rank owns, so that a pipeline stage never receives the others.

    Routes that `lent` names a place of stay whole: the rank cuts them itself, where it reads them.
    """

    def cut(row: TrainRow) -> TrainRow:
        routes = row.record.routes
        if routes is None or tuple(routes.layer_ids) == tuple(layer_ids) or lent(routes.experts) is not None:
            return row
        return replace(row, record=replace(row.record, routes=routes.select(layer_ids)))

    def share(mini: MiniBatch) -> MiniBatch:
        micro = tuple(replace(batch, rows=tuple(cut(row) for row in batch.rows)) for batch in mini.micro_batches)
        return replace(mini, micro_batches=micro)

    return replace(batch, mini_batches=tuple(share(mini) for mini in batch.mini_batches))


__all__ = ["RolloutController", "rank_share"]
