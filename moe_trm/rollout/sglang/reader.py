"""Answers that come within a moment of each other, read together (`together.parse_turns`).

An engine ends many samples in one pass, and their answers come one right behind the other. The last answer that is
still to come waits for nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from moe_trm.rollout.servers.question import Wanted
from moe_trm.rollout.servers.served_model import ServedModel
from moe_trm.rollout.sglang.together import Received, parse_turns
from moe_trm.types import SampledTurn

MOMENT_S = 4e-3
"""Longest wait of an answer for others: less than a pass of most models."""


class Reader:
    """Reads answers. Not thread-safe: one event loop owns it.

    Args:
        model: the sizes that they are checked against.
    """

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self._waiting: dict[Wanted, list[tuple[Received, asyncio.Future[SampledTurn]]]] = {}
        self._to_come = 0
        self._timer: asyncio.TimerHandle | None = None

    @contextmanager
    def awaiting(self) -> Iterator[None]:
        """Around a request: its answer is still to come."""
        self._to_come += 1
        try:
            yield
        finally:
            self._to_come -= 1

    async def turn(self, received: Received, wanted: Wanted) -> SampledTurn:
        """The checked answer. Raises `RecordRejected` as `parse_turn` does."""
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[SampledTurn] = loop.create_future()
        self._waiting.setdefault(wanted, []).append((received, turn))
        if not self._to_come:
            self._read()
        elif self._timer is None:
            self._timer = loop.call_later(MOMENT_S, self._read)
        return await turn

    def _read(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting, self._waiting = self._waiting, {}
        for wanted, answers in waiting.items():
            wished = [(received, turn) for received, turn in answers if not turn.done()]
            found: Sequence[SampledTurn | Exception]
            try:
                found = parse_turns([received for received, _ in wished], self._model, wanted)
            except Exception as error:  # noqa: BLE001 (whoever waits for an answer must be told)
                found = [error] * len(wished)
            for (_, turn), one in zip(wished, found, strict=True):
                if isinstance(one, Exception):
                    turn.set_exception(one)
                else:
                    turn.set_result(one)
