"""Steps after which the learner's weights go to the rollout engine: every k-th one, and the last."""

from __future__ import annotations

from dataclasses import dataclass


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
