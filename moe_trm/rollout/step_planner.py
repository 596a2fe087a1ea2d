"""From the samples of a step, or of a part of it, to the share of every data-parallel rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from moe_trm.advantages.compared import rewarded_samples
from moe_trm.batch.plan import compares_groups, plan_metrics, plan_step
from moe_trm.batch.train_rows import train_rows
from moe_trm.config.schema import Config
from moe_trm.rollout.evaluation import reward_of
from moe_trm.rollout.sampler import rewarded
from moe_trm.rollout.step_parts import versions_of
from moe_trm.rollout.store.reuse import Again, with_weights
from moe_trm.rollout.store.store import Group
from moe_trm.tasks.rewards import Reward
from moe_trm.types import MiniBatch, RewardedSample, RolloutRecord, TrainBatch


@dataclass(frozen=True)
class StepPlan:
    """The plan of a step, or of a part of it: all rows that it trains, and the minibatches of every data-parallel rank.

    `compared`: as in `TrainBatch`.
    """

    step: int
    records: list[RolloutRecord]
    minibatches: list[list[MiniBatch]]
    compared: tuple[tuple[RewardedSample, ...], ...]

    def shares(self, metrics: Mapping[str, float], bank: tuple[RolloutRecord, ...] = ()) -> list[TrainBatch]:
        """The share of every rank, each with these metrics; the fixed texts are dealt in turn."""
        versions, ranks = versions_of(self.records), len(self.minibatches)
        return [
            TrainBatch(self.step, tuple(rank_minibatches), metrics, versions, self.compared, bank[rank::ranks])
            for rank, rank_minibatches in enumerate(self.minibatches)
        ]


class StepPlanner:
    """Rows, minibatches and micro-batches as configured. A step is handed out in `parts` parts."""

    def __init__(self, config: Config) -> None:
        self._config, self._whole_groups = config, compares_groups(config.loss, config.rollout, config.agent)
        self._packed = config.batch.layout == "packed"
        self.parts = config.parts

    def samples_of(self, groups: Sequence[Group], step: int) -> list[RolloutRecord]:
        """The accepted samples of new groups; with `task.shuffle_rewards` each has the reward of another."""
        samples = [record for group in groups for record in group.kept]
        if not self._config.task.shuffle_rewards:
            return samples
        order = np.random.default_rng((self._config.seed, step, 1)).permutation(len(samples))
        rewards = [Reward(reward_of(samples[i]), samples[i].reward_parts) for i in order]
        return [rewarded(record, reward) for record, reward in zip(samples, rewards, strict=True)]

    def plan(self, step: int, samples: Sequence[RolloutRecord], again: Sequence[Again], data_size: int) -> StepPlan:
        """The plan of these new samples, and of those of groups that the step trains again.

        Without any there is no minibatch.
        """
        everything = [*samples, *(record for reused in again for record in reused.group.kept)]
        rows = with_weights([row for sample in everything for row in train_rows(sample)], again)
        if not rows:
            return StepPlan(step, [], [[] for _ in range(data_size)], ())
        learner = self._config.learner
        minibatches = plan_step(
            rows,
            seed=self._config.seed,
            step=step,
            minibatches=learner.minibatches // self.parts,
            data_size=data_size,
            micro_batch_rows=learner.micro_batch_rows,
            micro_batch_tokens=learner.micro_batch_tokens,
            whole_groups=self._whole_groups,
            packed=self._packed,
        )
        compared = rewarded_samples(self._config.advantage.name, everything)
        return StepPlan(step, [row.record for row in rows], minibatches, (compared,))

    def balance(self, minibatches: Sequence[Sequence[MiniBatch]]) -> dict[str, float]:
        """Metrics of the minibatches of every rank in a whole step."""
        parallel = self._config.learner.parallel
        return plan_metrics(minibatches, packed=self._packed, context=parallel.context, tensor=parallel.tensor)
