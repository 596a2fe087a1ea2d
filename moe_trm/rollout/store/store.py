"""Groups of samples between rollout and training, taken in the order of issue.

This keeps the data order independent of the speed of answers: long answers are neither late nor lost. The bound on age
at issue is then the bound on age at consumption. Age is still checked again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

from moe_trm.rollout.store.ledger import Ledger
from moe_trm.types import RolloutRecord

Outcome = RolloutRecord | str
"""Outcome of a sample: its record, with all its rows, or the reason of its rejection."""


@dataclass(frozen=True)
class Group:
    """The samples of one prompt.

    Attributes:
        group_id: place in the order of issue; also fixes the prompt.
        outcomes: of every sample, in the order of sample ids.
        kept: the records that may be trained; () for a group that was dropped and not replaced.
    """

    group_id: int
    outcomes: tuple[Outcome, ...]
    kept: tuple[RolloutRecord, ...]

    @cached_property
    def oldest_version(self) -> int:
        """Version of the weights that sampled its oldest token."""
        return min(int(row.versions.min()) for record in self.kept for row in record.rows)


class GroupStore:
    """Places in the order of issue; a place is held from issue until its group is taken, or dropped and replaced.

    Args:
        max_age: largest allowed difference between the learner's version and the oldest token of a group; 0:
            synchronous training.
        refills: groups that may be replaced for every batch, on average over the `max_age` + 1 batches that are under
            way at a time; a group dropped beyond that leaves its place empty in its batch.
    """

    def __init__(self, ledger: Ledger, max_age: int = 0, refills: int = 0) -> None:
        self._ledger, self._max_age = ledger, max_age
        self._refills, self._refills_left = refills, refills * (max_age + 1)
        self._places: dict[int, Group | None] = {}
        self._dropped: list[Group] = []

    def __len__(self) -> int:
        """Places held: groups being sampled and groups waiting."""
        return len(self._places)

    def open(self, group_id: int) -> None:
        """Give the next place to `group_id`."""
        assert not self._places or group_id > next(reversed(self._places)), "places are given in order"
        self._places[group_id] = None

    def admit(
        self,
        group_id: int,
        outcomes: Sequence[Outcome],
        *,
        sample_reason: Callable[[RolloutRecord], str | None] = lambda record: None,
        group_reason: Callable[[Sequence[RolloutRecord]], str | None] = lambda records: None,
    ) -> None:
        """Put a finished group in its place, or drop samples of it or all of it.

        The two functions return the reasons.
        """
        accepted = [outcome for outcome in outcomes if not isinstance(outcome, str)]
        for _ in accepted:
            self._ledger.queue()
        reason = group_reason(accepted)
        group = Group(group_id, tuple(outcomes), tuple(accepted))
        if reason is not None:
            self._drop(group, reason)
            return
        kept = []
        for record in accepted:
            if own_reason := sample_reason(record):
                self._ledger.drop(own_reason)
            else:
                kept.append(record)
        self._places[group_id] = Group(group_id, tuple(outcomes), tuple(kept))

    def take(self, count: int, version: int, *, ends_batch: bool = True) -> list[Group] | None:
        """The `count` oldest groups for a learner at `version`; None while one of them is being sampled.

        Groups with a token older than `max_age` are dropped under `age`. Only groups that are returned count as
        trained. `ends_batch`: with them a batch is complete, and groups of further ones may be replaced.
        """
        while (stale := self._first_stale(count, version)) is not None:
            self._drop(stale, "age")
        taken = [group for group in islice(self._places.values(), count) if group is not None]
        if len(taken) < count:
            return None
        for group in taken:
            del self._places[group.group_id]
            for _ in group.kept:
                self._ledger.train()
        if ends_batch:
            self._refills_left = min(self._refills_left + self._refills, self._refills * (self._max_age + 1))
        return taken

    def take_dropped(self) -> list[Group]:
        """Groups that were dropped whole since the last call, for the run's recording."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def ages(self, version: int) -> Counter[int]:
        """Waiting groups by age: versions between the learner's and their oldest token."""
        return Counter(version - group.oldest_version for group in self._places.values() if group and group.kept)

    def held(self) -> list[int]:
        """Group ids that have a place, in order."""
        return list(self._places)

    def _first_stale(self, count: int, version: int) -> Group | None:
        for group in islice(self._places.values(), count):
            if group is not None and group.kept and version - group.oldest_version > self._max_age:
                return group
        return None

    def _drop(self, group: Group, reason: str) -> None:
        for _ in group.kept:
            self._ledger.drop(reason)
        self._dropped.append(group)
        if self._refills_left > 0:
            self._refills_left -= 1
            self._places.pop(group.group_id)
        else:
            self._places[group.group_id] = Group(group.group_id, (), ())
