"""A server by itself: what disagrees is named, and a healthy one is not."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from moe_trm.errors import EngineError
from moe_trm.rollout.servers.backend import Array
from moe_trm.rollout.servers.http import EngineHttp, HttpStatusError
from moe_trm.rollout.servers.use_proof import Bounds
from moe_trm.rollout.sglang.backend import SglangBackend
from moe_trm.tools.audit.dump import AuditRow
from moe_trm.tools.audit.served import LONGEST, TEXTS, ask_server, judge_server, texts_of

HTTP = EngineHttp("http://server", None, timeout_s=1, max_attempts=1)
IDS = [[1, 2, 3, 4], [5, 6, 7, 8, 9], [2, 4]]


class Server(SglangBackend):
    """Scores an id i as -i, moved by `prefill` and `decode`.

    `cache`: what states in the prefix cache move; `random`: what moves from one answer to the next; `crowd`: what other
    requests move; `other`: it decodes another token each time.
    """

    def __init__(self, *, prefill: float = 0.0, decode: float = 0.0, cache: float = 0.0, random: float = 0.0,
                 crowd: float = 0.0, other: bool = False, busy: bool = False) -> None:  # fmt: skip
        self.prefill, self.decode, self.cache, self.random = prefill, decode, cache, random
        self.crowd, self.other, self.busy = crowd, other, busy
        self.calls = self.running = 0
        self.flushed = False

    async def decoded(self, http: EngineHttp, token_ids: Sequence[int], count: int) -> tuple[Array, Array]:
        self.calls += 1
        tokens = np.arange(count) + (self.calls if self.other else 0)
        shift = self.decode + (0.0 if self.flushed else self.cache) + self.random * self.calls
        return tokens, shift - tokens

    async def prefilled(self, http: EngineHttp, token_ids: Sequence[int]) -> Array:
        self.running += 1
        await asyncio.sleep(0)
        crowd = self.crowd * (self.running > 1)
        await asyncio.sleep(0)
        self.running -= 1
        return -np.array(token_ids[1:], np.float64) + self.prefill + crowd

    async def flush(self, http: EngineHttp) -> bool:
        if self.busy:
            raise HttpStatusError("refused", got=400)
        self.flushed = True
        return True


class Model:
    """The plain model."""

    def logprobs(self, token_ids: Sequence[int]) -> Array:
        return -np.array(token_ids[1:], np.float64)


def causes(server: Server) -> list[str]:
    answers = judge_server(asyncio.run(ask_server(server, HTTP, IDS)), Model(), Bounds(0.1, 0.25))  # type: ignore[arg-type]
    assert all((answer.status == "fail") == (answer.cause != "none") for answer in answers)
    return [answer.cause for answer in answers]


@pytest.mark.parametrize(
    ("faults", "expected"),
    [
        ({}, ["none"]),
        ({"prefill": 0.05, "decode": 0.05}, ["none"]),
        ({"decode": 0.5}, ["decoding"]),
        ({"prefill": 0.5, "decode": 0.5}, ["weights"]),
        ({"cache": 0.5, "decode": -0.5}, ["cache"]),
        ({"random": 0.2, "decode": -0.3}, ["repeats", "cache"]),
        ({"crowd": 0.5}, ["batches"]),
        ({"other": True}, ["repeats", "cache"]),
        ({"decode": float("nan")}, ["decoding", "repeats", "cache"]),
        ({"busy": True, "cache": 0.05}, ["none"]),
    ],
)
def test_what_disagrees_is_named(faults: dict[str, Any], expected: list[str]) -> None:
    found = causes(Server(**faults))
    assert set(expected) <= set(found), found
    if expected in (["none"], ["weights"], ["batches"]):
        assert found == expected


def test_a_cache_that_was_not_flushed_is_said() -> None:
    [answer] = judge_server(asyncio.run(ask_server(Server(busy=True), HTTP, IDS)), Model(), Bounds(0.1, 0.25))  # type: ignore[arg-type]
    assert "the cache was not flushed" in answer.sentence
    assert "cache_gap" not in answer.figures


def test_a_server_that_does_not_answer_is_no_healthy_one() -> None:
    class Silent(Server):
        async def prefilled(self, http: EngineHttp, token_ids: Sequence[int]) -> Array:
            raise EngineError("no answer")

    with pytest.raises(EngineError, match="no answer"):
        causes(Silent())


def test_texts_are_the_first_rows_of_the_dump() -> None:
    rows = [AuditRow(str(n), np.arange(LONGEST + n), np.arange(LONGEST + n) > 3) for n in range(TEXTS + 2)]
    assert [len(ids) for ids in texts_of(rows)] == [LONGEST] * TEXTS
