"""Accepted samples between rollout and training, with their age checked when they are consumed."""

from __future__ import annotations

from moe_trm.store.ledger import Ledger
from moe_trm.types import RolloutRecord


class SampleStore:
    """An in-memory queue of accepted records.

    Args:
        ledger: the books, kept by the store for what it holds.
        max_age: largest allowed difference between the learner's version and the oldest token of a record; 0: synchronous training.
    """

    def __init__(self, ledger: Ledger, max_age: int = 0) -> None:
        self._ledger = ledger
        self._max_age = max_age
        self._records: list[RolloutRecord] = []

    def admit(self, record: RolloutRecord) -> None:
        self._ledger.queue()
        self._records.append(record)

    def take(self, version: int) -> list[RolloutRecord]:
        """Everything young enough for a learner at `version`, ordered by sample id; older records are dropped and counted."""
        taken = []
        for record in sorted(self._records, key=lambda record: record.sample_id):
            if version - int(record.versions.min()) > self._max_age:
                self._ledger.drop("age")
            else:
                self._ledger.train()
                taken.append(record)
        self._records.clear()
        return taken
