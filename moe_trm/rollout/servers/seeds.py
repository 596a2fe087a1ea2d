"""Seeds of answers, for servers that sample deterministically."""

from __future__ import annotations

import hashlib
import itertools


class Seeds:
    """A seed for each answer of a run, made from the run's `seed`; with None, answers have none and the server draws.

    Without them, a server that samples deterministically would give all samples of a group the same answer.
    """

    def __init__(self, seed: int | None) -> None:
        self._seed, self._asked = seed, itertools.count()

    def of_sample(self, sample_id: int) -> int | None:
        """The seed of a sample, a function of the run's seed and its number alone."""
        return None if self._seed is None else self._made(f"sample-{sample_id}")

    def next(self) -> int | None:
        """The seed of an answer that no number names: a turn of a dialogue, or an evaluation."""
        return None if self._seed is None else self._made(f"answer-{next(self._asked)}")

    def _made(self, name: str) -> int:
        digest = hashlib.blake2b(f"{self._seed}-{name}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big", signed=True)
