"""The rollout controller: one training step's data from prompts to planned rows, and weights back to the engine.

It lives in its own process beside the learner ranks (`rollout.service`), so that routes and masks of a whole step never pass through a rank.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from moe_trm.batch.outcome import outcome_advantages
from moe_trm.batch.plan import plan_step
from moe_trm.config.schema import Config
from moe_trm.errors import ControllerError, RecordRejected
from moe_trm.rollout.bundle import BundleWriter
from moe_trm.rollout.engine import RolloutEngine
from moe_trm.sampling_mask.metrics import mask_metrics
from moe_trm.store.ledger import Ledger
from moe_trm.store.store import SampleStore
from moe_trm.sync.manifest import Share, WeightPush
from moe_trm.tasks.protocol import Task
from moe_trm.tasks.rewards import score, score_answer
from moe_trm.types import MiniBatch, Prompt, RolloutRecord, SamplingParams, TrainBatch, TrainRow


class RolloutController:
    """Generates, validates, rewards, stores and plans. Not thread-safe: one event loop owns it.

    Args:
        config: the run's configuration.
        engine: where samples come from.
        task: prompts and rewards.
        params: how the behaviour policy samples.
    """

    def __init__(self, config: Config, engine: RolloutEngine, task: Task, params: SamplingParams) -> None:
        self._config, self._engine, self._task, self._params = config, engine, task, params
        self._ledger = Ledger()
        self._store = SampleStore(self._ledger)
        self._writer = BundleWriter(config.record.bundle) if config.record.bundle else None
        self._version = -1

    async def load_weights(self, push: WeightPush) -> None:
        """Give the engine the learner's new weights; raises `SyncError` when it cannot be proved that they arrived."""
        await self._engine.load_weights(push)
        self._version = push.version

    async def receive_weights(self, version: int, shares: Sequence[Share]) -> None:
        """The same by broadcast from the learner ranks, which send while this runs."""
        await self._engine.receive_weights(version, shares)
        self._version = version

    async def plan(self, step: int, data_size: int) -> list[TrainBatch]:
        """One step: sample, check, reward, and cut into one `TrainBatch` per data-parallel rank."""
        started = time.perf_counter()
        await self._generate(step)
        records = self._store.take(self._version)
        seconds = time.perf_counter() - started
        if not records:
            raise ControllerError(
                "no record of this step was accepted",
                where=f"step {step}",
                got=dict(self._ledger.rejected),
                expected="at least one accepted sample",
                fix="The reasons above say what the engine sent; `rollout.log` in the run directory has its side.",
            )
        if self._config.task.shuffle_rewards:
            records = _shuffle_rewards(records, seed=self._config.seed, step=step)
        advantages = outcome_advantages(
            self._config.advantage.name,
            np.array([record.reward for record in records], np.float64),
            np.array([record.group_id for record in records]),
            np.array([record.num_sampled for record in records]),
            normalize_std=self._config.advantage.normalize_std,
        )
        rows = [TrainRow(record, float(advantage)) for record, advantage in zip(records, advantages, strict=True)]
        learner = self._config.learner
        plan = plan_step(
            rows,
            seed=self._config.seed,
            step=step,
            minibatches=learner.minibatches,
            data_size=data_size,
            micro_batch_rows=learner.micro_batch_rows,
        )
        metrics = self._metrics(records, seconds)
        return [TrainBatch(step, tuple(share), metrics) for share in plan]

    async def evaluate(self) -> Mapping[str, float]:
        """Greedy accuracy and answer length on the held-out prompts, with the weights the engine has now.

        Empty without held-out prompts, and on a recorded run, whose engine has no weights.
        """
        prompts = self._task.eval_prompts()
        if not prompts or self._config.rollout.engine == "bundle":
            return {}
        greedy = replace(self._params, temperature=1.0, top_p=1.0, top_k=1, min_p=0.0)
        answers = await self._engine.generate_greedy(prompts, greedy)
        rewards = [
            score_answer(self._task, prompt, ids, finished=bool(ids))
            for prompt, ids in zip(prompts, answers, strict=True)
        ]
        return {
            "eval/accuracy": float(np.mean(rewards)),
            "eval/length_mean": float(np.mean([len(ids) for ids in answers])),
            "eval/prompts": float(len(prompts)),
        }

    async def close(self) -> None:
        self._task.close()
        await self._engine.close()

    async def _generate(self, step: int) -> None:
        prompts = self._task.train_prompts(step, self._config.rollout.prompts_per_step)
        size = self._config.rollout.group_size
        first = (step - 1) * self._config.rollout.prompts_per_step
        outcomes = await asyncio.gather(
            *(
                self._sample(prompt, sample_id=(first + i) * size + j, group_id=first + i)
                for i, prompt in enumerate(prompts)
                for j in range(size)
            )
        )
        if self._writer:
            accepted = [outcome for outcome in outcomes if isinstance(outcome, RolloutRecord)]
            rejected = {
                number: outcome for number, outcome in enumerate(outcomes, first * size) if isinstance(outcome, str)
            }
            self._writer.write(step, accepted, rejected)

    async def _sample(self, prompt: Prompt, *, sample_id: int, group_id: int) -> RolloutRecord | str:
        """The accepted record, or the reason of its rejection."""
        self._ledger.issue()
        try:
            record = await self._engine.generate(prompt, self._params, sample_id=sample_id, group_id=group_id)
            record = replace(record, reward=score(self._task, prompt, record))
        except RecordRejected as rejection:
            self._ledger.reject(rejection.reason)
            return rejection.reason
        self._store.admit(record)
        return record

    def _metrics(self, records: Sequence[RolloutRecord], seconds: float) -> dict[str, float]:
        rewards = np.array([record.reward for record in records])
        lengths = np.array([record.num_sampled for record in records])
        groups = np.array([record.group_id for record in records])
        spread = [np.ptp(rewards[groups == group]) for group in np.unique(groups)]
        versions = np.concatenate([record.versions for record in records])
        if not self._ledger.balanced:
            raise ControllerError(
                "the sample ledger does not balance", got=self._ledger, expected="issued = sum of all places"
            )
        return {
            "reward/mean": float(rewards.mean()),
            "reward/zero_variance_groups": float(np.mean(np.array(spread) == 0)),
            "response/length_mean": float(lengths.mean()),
            "response/length_max": float(lengths.max()),
            "response/finished_fraction": float(np.mean([record.finish_reason == "stop" for record in records])),
            "rollout/tokens_per_s": float(lengths.sum() / seconds),
            "rollout/age_mean": float((self._version - versions).mean()),
            "rollout/age_max": float((self._version - versions).max()),
            "time/rollout_s": seconds,
            **mask_metrics(records, self._params),
            **self._ledger.metrics(),
        }


def _shuffle_rewards(records: Sequence[RolloutRecord], *, seed: int, step: int) -> list[RolloutRecord]:
    order = np.random.default_rng((seed, step, 1)).permutation(len(records))
    return [replace(record, reward=records[i].reward) for record, i in zip(records, order, strict=True)]


def rank_share(batch: TrainBatch, layer_ids: Sequence[int]) -> TrainBatch:
    """`batch` with only the route layers that its rank owns, so that a pipeline stage never receives the others."""

    def cut(row: TrainRow) -> TrainRow:
        routes = row.record.routes
        if routes is None or tuple(routes.layer_ids) == tuple(layer_ids):
            return row
        return replace(row, record=replace(row.record, routes=routes.select(layer_ids)))

    def share(mini: MiniBatch) -> MiniBatch:
        micro = tuple(replace(batch, rows=tuple(cut(row) for row in batch.rows)) for batch in mini.micro_batches)
        return replace(mini, micro_batches=micro)

    return replace(batch, mini_batches=tuple(share(mini) for mini in batch.mini_batches))


__all__ = ["RolloutController", "rank_share"]
