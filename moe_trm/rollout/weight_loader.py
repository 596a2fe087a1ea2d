"""The learner's weights on their way into the engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from moe_trm.rollout.engine import RolloutEngine
from moe_trm.sync.manifest import Share, WeightPush


class WeightLoader:
    """Hands each push to the engine, and then lets samples of the new version begin by `admit`.

    `overlaps`: samples are made while the learner trains. `push_s`: seconds that the last push took.
    """

    def __init__(self, engine: RolloutEngine, admit: Callable[[int], None], *, overlaps: bool) -> None:
        self._engine, self._admit, self._overlaps = engine, admit, overlaps
        self.push_s = 0.0

    async def load(self, push: WeightPush) -> None:
        """See `RolloutController.load_weights`."""
        with self._timed():
            if self._engine.traits.awaits_weights and not self._overlaps:
                self._engine.expect(push.version)
                self._admit(push.version)
            await self._engine.load_weights(push)
        self._admit(push.version)

    async def receive(self, version: int, shares: Sequence[Share]) -> None:
        """See `RolloutController.receive_weights`."""
        with self._timed():
            await self._engine.receive_weights(version, shares)
        self._admit(version)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.push_s = time.perf_counter() - started
