"""Advantages of made-up samples, as the learner gives them (`moe_trm.step.advantages`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from moe_trm.advantages.by_row import Array
from moe_trm.advantages.compared import rewarded_samples
from moe_trm.batch.collate import collate
from moe_trm.batch.train_rows import train_rows
from moe_trm.config.schema import Config
from moe_trm.learner.protocol import Scores
from moe_trm.step.advantages import Advantages, own_records, placed
from moe_trm.step.passes import AnchoredMinibatch
from moe_trm.types import MicroBatch, MiniBatch, RolloutRecord, TokenBatch, TrainBatch, TrainRow
from routing.record.sources import Native
from tests.unit.doubles import StandInLearner


def estimator(config: Config) -> Advantages:
    """As a run with this configuration has it."""
    return Advantages(config.advantage, config.batch, config.task.reward_weights)


def valued(rows: Sequence[TrainRow], *of_rows: float, keep_mask: bool = False) -> TokenBatch:
    """A micro-batch of these rows; the tokens of each have one of these advantages, or all have 1."""
    batch = collate(MicroBatch(tuple(rows)), keep_mask=keep_mask)
    values = of_rows or (1.0,) * len(rows)
    of_tokens = [np.full(row.record.num_scored, own) for row, own in zip(rows, values, strict=True)]
    return placed(batch, of_tokens, [0.0] * len(rows))


def at_the_rollout(mini: MiniBatch) -> AnchoredMinibatch:
    """A minibatch whose policy at the step's start is the rollout's."""
    batches = [collate(micro, keep_mask=False) for micro in mini.micro_batches]
    return AnchoredMinibatch(
        mini, batches, [Scores(batch.rollout_logprobs) for batch in batches], [Native()] * len(batches)
    )


def of_step(shares: Sequence[TrainBatch], config: Config) -> dict[int, Array]:
    """`[S]` of the scored tokens of each row of a planned step, by its number."""
    parts = [at_the_rollout(mini) for share in shares for mini in share.mini_batches]
    values = estimator(config).of_rows(StandInLearner(), parts, shares[0].compared)
    return {record.row_id: own for record, own in zip(own_records(parts), values, strict=True)}


def of_samples(samples: Sequence[RolloutRecord], name: str, **sections: Any) -> list[list[Array]]:
    """`[S]` of the scored tokens of each row of each sample under the estimator `name`.

    `sections`: of the configuration; those of `advantage` beside the name.
    """
    settings = {**sections, "advantage": {"name": name, **sections.get("advantage", {})}}
    config = Config.model_validate({"model": {"checkpoint": "none"}, "sampling_mask": {"mode": "keep"}, **settings})
    rows = tuple(row for sample in samples for row in train_rows(sample))
    mini = MiniBatch((MicroBatch(rows),), len(samples), 0)
    share = TrainBatch(1, (mini,), {}, (), (rewarded_samples(name, samples),))
    found = of_step([share], config)
    return [[found[row.row_id] for row in sample.rows] for sample in samples]
