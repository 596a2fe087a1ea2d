"""A step on its way from the queue to the ranks: whole, or minibatch by minibatch as its groups arrive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from moe_trm.rollout.store.reuse import Again
from moe_trm.rollout.store.store import Group
from moe_trm.types import MiniBatch, RolloutRecord


@dataclass
class StepParts:
    """The parts of a step that have arrived.

    Attributes:
        queue_ages: groups that waited when the step was asked for, by age.
        again: groups of earlier steps that it trains again.
        groups: its own groups, and `samples` the accepted ones.
        trained: all rows that it trains.
        plan: minibatches of every data-parallel rank.
    """

    queue_ages: Mapping[int, int]
    again: Sequence[Again]
    groups: list[Group] = field(default_factory=list)
    samples: list[RolloutRecord] = field(default_factory=list)
    trained: list[RolloutRecord] = field(default_factory=list)
    plan: list[list[MiniBatch]] = field(default_factory=list)

    def add(self, trained: Sequence[RolloutRecord], plan: Sequence[Sequence[MiniBatch]]) -> None:
        """Count another part in."""
        self.trained += trained
        self.plan = self.plan or [[] for _ in plan]
        for planned, part in zip(self.plan, plan, strict=True):
            planned += part


def versions_of(records: Sequence[RolloutRecord]) -> tuple[int, ...]:
    """Weight versions that sampled anything in `records`, ascending."""
    if not records:
        return ()
    return tuple(np.unique(np.concatenate([record.versions for record in records])).tolist())
