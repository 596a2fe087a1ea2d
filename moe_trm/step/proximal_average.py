"""The proximal policy as an average of the learner's weights over the steps (PPO-EWMA)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_trm.config.schema import PipelineConfig
from moe_trm.learner.protocol import Learner

NAME = "proximal"
"""Snapshot with the averaged weights."""


class ProximalAverage:
    """Average of the weights at the start of each step: sum_j beta^(n - j) theta_j / sum_j beta^(n - j), j = 1 .. n.

    The weights of all steps so far count, the newest most, and their shares add up to 1 from the first step on. beta is
    `pipeline.proximal_decay`. Source: PPO-EWMA (arXiv 2110.00641), whose code divides by the sum of shares in the same
    way. There a step is an optimizer step. Here it is a training step, at whose start the anchors of its minibatches
    are made.
    """

    def __init__(self, decay: float) -> None:
        self._decay, self._total = decay, 0.0

    @classmethod
    def of(cls, pipeline: PipelineConfig) -> ProximalAverage | None:
        """That of a run; None where the anchor is the learner at the start of a step."""
        return cls(pipeline.proximal_decay) if pipeline.proximal == "average" else None

    def absorb(self, learner: Learner) -> None:
        """Take the learner's present weights into the snapshot `NAME`. Once for each step."""
        self._total = self._decay * self._total + 1
        learner.average(NAME, 1 / self._total)

    def state(self) -> dict[str, Any]:
        """State for a checkpoint, beside the snapshot, which the learner saves."""
        return {"total": self._total}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on after `state`."""
        self._total = float(state["total"])
