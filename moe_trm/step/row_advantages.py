"""Advantages that need the learner's scores: made anew over the whole step once its anchors are known.

Shape letters: N rows of the step on all ranks; B rows and R forwarded tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from moe_trm.batch.advantages import Array, opob
from moe_trm.batch.filters import without_overlong
from moe_trm.batch.token_advantages import score_energy
from moe_trm.config.schema import Config
from moe_trm.learner.protocol import Learner
from moe_trm.methods.advantages import ADVANTAGES
from moe_trm.step.passes import Anchored
from moe_trm.types import RolloutRecord, TokenBatch


def with_ratios(config: Config, learner: Learner, parts: Sequence[Anchored]) -> list[Anchored]:
    """The minibatches of a step with the advantages of an estimator that reads ratios; as they were under another.

    Collective.
    """
    if not ADVANTAGES[config.advantage.name].reads_ratios:
        return list(parts)
    records = own_records(parts)
    advantages = opob(
        everyone(learner, [record.reward or 0.0 for record in records]),
        everyone(learner, [record.group_id for record in records]),
        everyone(learner, log_sequence_ratios(parts)),
        everyone(learner, [float(score_energy(record).sum()) for record in records]),
        lone=config.advantage.lone_sample or "zero",
    )
    return with_rows(config, learner, parts, advantages)


def own_records(parts: Sequence[Anchored]) -> list[RolloutRecord]:
    """This rank's records of the step, in the order of its micro-batches."""
    return [row.record for part in parts for micro in part.mini.micro_batches for row in micro.rows]


def log_sequence_ratios(parts: Sequence[Anchored]) -> list[float]:
    """Log of the ratio of each of this rank's rows, policy at the step's start over rollout: sum over its tokens."""
    return [
        float((score.logprobs - batch.rollout_logprobs)[row][batch.mask[row]].double().sum())
        for part in parts
        for micro, batch, score in zip(part.mini.micro_batches, part.batches, part.scores, strict=True)
        for row in range(len(micro.rows))
    ]


def everyone(learner: Learner, values: Sequence[float]) -> Array:
    """`values` of all ranks, `[N]` float64. Collective."""
    return learner.gather(torch.tensor(values, dtype=torch.float64)).cpu().numpy()


def with_rows(config: Config, learner: Learner, parts: Sequence[Anchored], advantages: Array) -> list[Anchored]:
    """The minibatches with `advantages` `[N]` of all rows of the step, in the order of `everyone`. Collective."""
    records = own_records(parts)
    ids = everyone(learner, [record.row_id for record in records])
    of_row = dict(zip(ids.tolist(), advantages.tolist(), strict=True))
    own = np.array([of_row[record.row_id] for record in records])
    values = iter(without_overlong(records, own, config.batch).tolist())
    return [
        replace(
            part,
            batches=[
                _with_advantages(batch, [next(values) for _ in micro.rows])
                for batch, micro in zip(part.batches, part.mini.micro_batches, strict=True)
            ],
        )
        for part in parts
    ]


def _with_advantages(batch: TokenBatch, of_row: Sequence[float]) -> TokenBatch:
    advantages = torch.zeros(len(batch.mask), 1)
    advantages[: len(of_row), 0] = torch.tensor(of_row)
    return replace(batch, advantages=torch.where(batch.mask, advantages.to(batch.mask.device), 0.0))
