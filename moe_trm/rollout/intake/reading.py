"""What an intake process gives back, and the part of it that knows an engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from moe_trm.types import RolloutRecord, SampledTurn


@dataclass(frozen=True)
class Reading:
    """A checked answer.

    Attributes:
        value: the record of a whole sample; else the turn, also where a push cut what was to be a whole sample.
        retracted: as in `SampledTurn`.
        written: `tasks.rewards.written_text` of a whole sample, where a tokenizer was there.
    """

    value: RolloutRecord | SampledTurn
    retracted: bool
    written: tuple[str, str] | None = None


class Reader(Protocol):
    """Asks servers of one engine and reads their answers. Made in an intake process, of `IntakeSettings.settings`."""

    async def read(self, url: str, asked: Any) -> Reading:
        """The checked answer of the server at `url`.

        Raises `RecordRejected`, and the `EngineError`s of its engine.
        """
