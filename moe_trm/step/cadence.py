"""Steps after which the learner's weights go to the rollout engine, and pushes with which more is proved."""

from __future__ import annotations

from dataclasses import dataclass

from moe_trm.learner.protocol import Learner

FIRST_PUSHES = 3
"""Pushes from the begin of a run that are all proved by use: servers and settings are new then."""


@dataclass(frozen=True)
class Cadence:
    """Versions that the engine is given. The version of the learner's weights is the number of steps they have trained.

    `every`: `pipeline.push_every`. `first`, which the run began with, is always pushed: a resumed run begins between
    two pushes, too. `last`, after the last step, is evaluated.
    """

    every: int
    first: int
    last: int

    def pushes(self, version: int) -> bool:
        """True when the engine is given this version."""
        return version in (self.first, self.last) or version % self.every == 0

    def held(self, bound: int) -> int:
        """Versions at most that were pushed, or are the learner's own, among those `bound` versions back."""
        return bound // self.every + 1


@dataclass(frozen=True)
class ProofCadence:
    """Pushes with which more is proved than with the others: the first of a process, and one of `every` after them.

    `every`: `sync.prove_every`; none where it is 0.
    """

    every: int

    def due(self, number: int) -> bool:
        """True for the push `number` of this process, from 0."""
        return bool(self.every) and (number < FIRST_PUSHES or number % self.every == 0)


class Replicas:
    """Compares what learner ranks hold alike: before the first push, so after the load, and as `ProofCadence` says."""

    def __init__(self, every: int) -> None:
        self._cadence, self._pushes = ProofCadence(every), 0

    def check(self, learner: Learner) -> None:
        """To be called before every push, on all ranks. Raises `ReplicaError`; nothing is pushed then."""
        number, self._pushes = self._pushes, self._pushes + 1
        if not number or self._cadence.due(number):
            learner.check_replicas()
