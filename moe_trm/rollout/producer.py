"""Issue of prompt groups ahead of training, within the bound on staleness, and admission of the finished ones.

A group may be issued when, counting it, floor((N - 1) / B) <= i + eta. N groups were issued and neither dropped nor
rejected whole, B is `rollout.prompts_per_step`, i the version of the weights that would sample, and eta
`pipeline.max_staleness`. Groups are trained in the order of issue. So the n-th is consumed at version floor((n - 1) /
B), at most eta versions later.

Source: AReaL (arXiv 2505.24298), section 5.1.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable

from moe_trm.batch.filters import reason_to_drop, reason_to_drop_sample
from moe_trm.config.schema import BatchConfig
from moe_trm.errors import RecordRejected
from moe_trm.rollout.kept_sets import check_kept_sets
from moe_trm.rollout.sampler import Sampler
from moe_trm.rollout.store.ledger import Ledger
from moe_trm.rollout.store.store import Group, GroupStore, Outcome
from moe_trm.rollout.turn import recorded_positions
from moe_trm.sampling_mask.bounds import SamplerBounds
from moe_trm.types import Prompt, RolloutRecord

log = logging.getLogger(__name__)

NUM_LOGGED = 3
"""Rejections of each reason that are logged in full; the rest are only counted."""


class Producer:
    """Runs the sampling of groups. Not thread-safe: one event loop owns it.

    Args:
        prompt: the prompt of a group, a function of its number alone.
        filters: which valid samples and groups are dropped.
        batch_groups: groups of one training step (B).
        concurrency: no further group is started while this many samples are being made.
        bounds: a sample without sampling mask and log-probs of it is rejected (`mask_missing`), and one whose mask the
            sampler cannot have kept (`check_kept_sets`). None: masks are not needed.
        indexers: layers with an indexer, and how many positions each chooses. A sample without these positions is
            rejected (`route_positions`). None: none are needed.
    """

    def __init__(
        self,
        sampler: Sampler,
        prompt: Callable[[int], Prompt],
        store: GroupStore,
        ledger: Ledger,
        filters: BatchConfig,
        *,
        batch_groups: int,
        group_size: int,
        concurrency: int,
        bounds: SamplerBounds | None = None,
        indexers: tuple[tuple[int, ...], int] | None = None,
    ) -> None:
        self._sampler, self._prompt, self._store, self._ledger = sampler, prompt, store, ledger
        self._filters, self._batch, self._size, self._concurrency = filters, batch_groups, group_size, concurrency
        self._next_group, self._again, self._taken = 0, deque[int](), 0
        self._steps, self._sampling, self._bounds = 0, 0, bounds
        self._indexers = indexers
        self._running: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._failure: BaseException | None = None
        self.clock = BusyClock()
        self.examples: dict[str, str] = {}
        """The first rejection of each reason, in words."""

    def admit_steps(self, steps: int) -> None:
        """Groups of the first `steps` training steps may be issued: i + eta + 1. Starts what is now admitted."""
        self._steps = max(self._steps, steps)
        self._issue()

    async def take(self, version: int, *, parts: int = 1, ends_step: bool = True) -> list[Group]:
        """The next step's groups, or one of `parts` equal parts, for a learner at `version`, once they are there.

        Raises what stopped a sampler.
        """
        count = self._batch // parts
        while (groups := self._store.take(count, version, ends_batch=ends_step)) is None:
            if self._failure is not None:
                raise self._failure
            self._issue()
            self._changed.clear()
            await self._changed.wait()
        self._taken += count
        self._issue()
        return groups

    async def again(self, group_id: int) -> Group:
        """A group that was trained before, from an engine that repeats its samples. The books know it already."""
        prompt, first = self._prompt(group_id), group_id * self._size
        outcomes: list[Outcome] = []
        for sample_id in range(first, first + self._size):
            try:
                outcomes.append(await self._accepted(prompt, sample_id=sample_id, group_id=group_id))
            except RecordRejected as rejection:
                outcomes.append(rejection.reason)
        kept = [
            outcome
            for outcome in outcomes
            if not isinstance(outcome, str) and not reason_to_drop_sample(outcome, self._filters)
        ]
        return Group(group_id, tuple(outcomes), tuple(kept))

    def state(self) -> dict[str, object]:
        """State for a resumed run: the groups taken, the next number, and the numbers to issue again."""
        return {
            "taken": self._taken,
            "next_group": self._next_group,
            "issue_again": [*self._store.held(), *self._again],
        }

    def restore(self, *, taken: int, next_group: int, issue_again: Iterable[int]) -> None:
        """Continue after `state`; before anything was issued."""
        self._taken, self._next_group, self._again = taken, next_group, deque(issue_again)

    async def close(self) -> None:
        """Give up what is being sampled."""
        self._steps = 0
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    def _issue(self) -> None:
        limit = self._steps * self._batch
        while self._failure is None and self._taken + len(self._store) < limit and self._sampling < self._concurrency:
            group_id = self._again.popleft() if self._again else self._next_group
            self._next_group = max(self._next_group, group_id + 1)
            self._store.open(group_id)
            for _ in range(self._size):
                self._ledger.issue()
            self._sampling += self._size
            task = asyncio.ensure_future(self._make(group_id))
            self._running.add(task)
            task.add_done_callback(self._done)
        self.clock.set(busy=bool(self._running))

    def _done(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = self._failure or error
        self._issue()
        self._changed.set()

    async def _make(self, group_id: int) -> None:
        prompt, first = self._prompt(group_id), group_id * self._size
        outcomes = await asyncio.gather(
            *(self._sample(prompt, sample_id=first + j, group_id=group_id) for j in range(self._size))
        )
        self._store.admit(
            group_id,
            outcomes,
            sample_reason=lambda record: reason_to_drop_sample(record, self._filters),
            group_reason=lambda records: reason_to_drop(records, self._filters),
        )

    async def _sample(self, prompt: Prompt, *, sample_id: int, group_id: int) -> Outcome:
        outcome: Outcome
        try:
            outcome = await self._accepted(prompt, sample_id=sample_id, group_id=group_id)
        except RecordRejected as rejection:
            self._ledger.reject(rejection.reason)
            self.examples.setdefault(rejection.reason, str(rejection))
            if self._ledger.rejected[rejection.reason] <= NUM_LOGGED:
                log.warning("rejected as %s: %s", rejection.reason, rejection)
            outcome = rejection.reason
        self._sampling -= 1
        self._issue()
        return outcome

    async def _accepted(self, prompt: Prompt, *, sample_id: int, group_id: int) -> RolloutRecord:
        sample = await self._sampler.sample(prompt, sample_id=sample_id, group_id=group_id)
        # An engine of the user's own may know nothing of samples; SGLang's binds its routes itself.
        record = sample.bound()
        if self._bounds is not None:
            for row in record.rows:
                check_kept_sets(row, self._bounds)
        if self._indexers is not None:
            for row in record.rows:
                recorded_positions(row, *self._indexers)
        return record


class BusyClock:
    """Seconds during which something was being sampled, and seconds during which nothing was."""

    def __init__(self) -> None:
        self._busy, self._since, self._seconds = False, time.perf_counter(), {True: 0.0, False: 0.0}

    def set(self, *, busy: bool) -> None:
        """From now on."""
        now_s = time.perf_counter()
        self._seconds[self._busy] += now_s - self._since
        self._busy, self._since = busy, now_s

    def take(self) -> tuple[float, float]:
        """Busy and idle seconds since the last call."""
        self.set(busy=self._busy)
        busy, idle = self._seconds[True], self._seconds[False]
        self._seconds = {True: 0.0, False: 0.0}
        return busy, idle
