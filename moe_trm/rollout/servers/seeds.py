"""Seeds of answers, for servers that sample deterministically."""

from __future__ import annotations

import hashlib
import itertools


class Seeds:
    """A seed of its own for each answer of a run.

    A server that samples deterministically gives answers to one prompt under one seed alike, and has one seed for all
    that bring none. A group of samples would then be one sample, many times.

    Args:
        seed: of the run; None: the server draws by itself, and answers have no seeds.
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
