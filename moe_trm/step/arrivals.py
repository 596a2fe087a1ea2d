"""A step's samples on their way to the updates: all at once, or one minibatch after the other as they arrive.

With `pipeline.stream` a step's minibatches are its groups in the order of issue, cut into equal parts, and the first
trains while the last is still being sampled. Anchors are taken at the step's start in either case (`step.anchors`). So
it makes no difference to the result when a part arrives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from moe_trm.errors import ControllerLeaving
from moe_trm.observe.phases import Phases
from moe_trm.types import TrainBatch


class Source(Protocol):
    """Source of the steps' samples, such as `RolloutClient`."""

    def next_batch(self, step: int, layer_ids: tuple[int, ...], part: int = 0) -> TrainBatch:
        """This rank's rows of `step`, or of a part of it."""


class Arrivals:
    """The `parts` of each step, from `source`. Waiting for samples is timed as `wait`.

    Attributes:
        undone: the source was asked to end before a step that it had begun, and none of the step was given.
    """

    def __init__(self, parts: int, source: Source, phases: Phases) -> None:
        self._parts, self.undone = parts, False
        self._source, self._phases = source, phases

    def of(self, step: int, layer_ids: tuple[int, ...], *, whole: bool) -> Iterator[TrainBatch]:
        """The minibatches of `step`, in parts as they arrive; `whole`: all together, once all are there.

        The last part has the metrics of the step. A part without any accepted sample has no minibatch. Raises
        `ControllerLeaving` where that is asked to end after the first of several.
        """
        parts = (self._next(step, layer_ids, part) for part in range(self._parts))
        try:
            first = joined([*parts]) if whole else next(parts)
        except ControllerLeaving:
            self.undone = True
            return
        yield first
        yield from parts

    def _next(self, step: int, layer_ids: tuple[int, ...], part: int) -> TrainBatch:
        with self._phases.time("wait"):
            return self._source.next_batch(step, layer_ids, part)


def joined(parts: Sequence[TrainBatch]) -> TrainBatch:
    """The parts of a step as one batch."""
    minis = tuple(mini for part in parts for mini in part.mini_batches)
    versions = tuple(sorted({version for part in parts for version in part.versions}))
    compared = tuple(samples for part in parts for samples in part.compared)
    return TrainBatch(parts[-1].step, minis, parts[-1].metrics, versions, compared, parts[-1].bank)
