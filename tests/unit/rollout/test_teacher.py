"""Log-probs of a teacher on every sampled token, over HTTP, for all rows of a sample."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from moe_trm.errors import EngineError, RecordRejected
from moe_trm.rollout.servers.http import EngineHttp
from moe_trm.rollout.sglang.backend import SglangBackend
from moe_trm.rollout.teacher import SCORED_TWICE, TaughtSampler
from moe_trm.types import Prompt, RolloutRecord, SamplingParams
from tests.unit.records import make_record, split_record
from tests.unit.rollout.local_app import LocalApp

Entries = list[list[Any]]


class Teacher(LocalApp):
    """Log-prob -(id + place / 64) of each token; `changed` says what it answers instead."""

    def __init__(self, changed: Callable[[Entries], Entries] = lambda entries: entries) -> None:
        self.asked, self._changed = list[dict[str, Any]](), changed

    def routes(self) -> Sequence[web.RouteDef]:
        return [web.get("/health", self.well), web.post("/generate", self.answer)]

    async def well(self, request: web.Request) -> web.Response:
        return web.Response()

    async def answer(self, request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == "Bearer key"
        self.asked.append(asked := await request.json())
        assert asked["logprob_start_len"] == 0
        entries = [[-(token + place / 64), token, None] for place, token in enumerate(asked["input_ids"])]
        entries[0][0] = None  # as SGLang: nothing predicts the first one
        return web.json_response({"meta_info": {"input_token_logprobs": self._changed(entries)}})


class Sampling:
    """Samples of one row, and sessions of two where the number is odd."""

    async def sample(self, prompt: Prompt, *, sample_id: int, group_id: int) -> RolloutRecord:
        record = make_record(sample_id=sample_id, group_id=group_id)
        return split_record(record, [2, 3]) if sample_id % 2 else record

    async def answer(self, prompt: Prompt, params: SamplingParams) -> RolloutRecord:
        return make_record()

    def metrics(self) -> dict[str, float]:
        return {"agent/calls": 3.0}

    async def close(self) -> None:
        pass


def taught(teachers: Sequence[Teacher], count: int) -> tuple[list[RolloutRecord | BaseException], dict[str, float]]:
    async def go() -> tuple[list[RolloutRecord | BaseException], dict[str, float]]:
        for teacher in teachers:
            await teacher.start()
        servers = [EngineHttp(teacher.url, "key", timeout_s=30.0, max_attempts=1) for teacher in teachers]
        sampler = TaughtSampler(Sampling(), servers, SglangBackend())
        made = (sampler.sample(Prompt("p", (1,)), sample_id=i, group_id=0) for i in range(count))
        found = await asyncio.gather(*made, return_exceptions=True)
        bare = await sampler.answer(Prompt("p", (1,)), SamplingParams())
        assert bare.teacher_logprobs is None, "evaluations have no teacher"
        await sampler.close()
        for teacher in teachers:
            await teacher.stop()
        return found, sampler.metrics()

    return asyncio.run(go())


def test_every_row_has_the_log_probs_of_its_own_tokens() -> None:
    teachers = Teacher(), Teacher()
    found, metrics = taught(teachers, 6)
    rows = [row for record in found if isinstance(record, RolloutRecord) for row in record.rows]
    assert len(rows) == 9
    for row in rows:
        places = np.flatnonzero(row.sampled)
        assert row.teacher_logprobs is not None
        np.testing.assert_allclose(row.teacher_logprobs, -(row.tokens[places] + places / 64), rtol=1e-6)
    assert all(teacher.asked for teacher in teachers)
    assert metrics == {"agent/calls": 3.0, "teacher/tokens": 30.0, "teacher/repeat_abs_diff": 0.0}


def test_what_the_teachers_own_noise_makes_is_measured() -> None:
    calls = iter(range(1000))

    def noisy(entries: Entries) -> Entries:
        move = 0.5 * (next(calls) % 2)
        return [[None if value is None else value - move, token, None] for value, token, _ in entries]

    _, metrics = taught([Teacher(noisy)], 1)
    assert metrics["teacher/repeat_abs_diff"] == pytest.approx(0.5)
    assert SCORED_TWICE > 1


def test_zero_may_stand_for_the_last_id_and_for_no_other() -> None:
    """SGLang writes it so."""

    def cleared(which: Callable[[Sequence[int]], int]) -> Callable[[Entries], Entries]:
        def change(entries: Entries) -> Entries:
            taken = which([token for _, token, _ in entries])
            return [[value, 0 if token == taken else token, None] for value, token, _ in entries]

        return change

    [found], _ = taught([Teacher(cleared(max))], 1)
    assert isinstance(found, RolloutRecord)
    [found], _ = taught([Teacher(cleared(lambda tokens: sorted(set(tokens))[-2]))], 1)
    assert isinstance(found, EngineError)


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        (lambda entries: entries[:-1], EngineError, "not of the tokens"),
        (lambda entries: [[value, token + 1, None] for value, token, _ in entries], EngineError, "not of the tokens"),
        (lambda _: [], EngineError, "log-probs of 0 tokens"),
        (lambda entries: [*entries[:-1], [None, *entries[-1][1:]]], RecordRejected, "1 of 5"),
    ],
)
def test_other_answers_are_no_teacher(
    changed: Callable[[Entries], Entries], error: type[Exception], words: str
) -> None:
    [found], _ = taught([Teacher(changed)], 1)
    assert isinstance(found, error)
    assert words in str(found)


def test_a_record_without_sampled_tokens_is_not_scored_twice() -> None:
    class Nothing(Sampling):
        async def sample(self, prompt: Prompt, *, sample_id: int, group_id: int) -> RolloutRecord:
            record = make_record(num_sampled=1)
            return replace(record, sampled=np.zeros_like(record.sampled), rollout_logprobs=np.zeros(0, np.float32))

    async def go() -> None:
        teacher = Teacher()
        await teacher.start()
        servers = [EngineHttp(teacher.url, "key", timeout_s=30.0, max_attempts=1)]
        sampler = TaughtSampler(Nothing(), servers, SglangBackend())
        row = await sampler.sample(Prompt("p", (1,)), sample_id=0, group_id=0)
        assert row.teacher_logprobs is not None
        assert len(row.teacher_logprobs) == 0
        assert len(teacher.asked) == 1
        await sampler.close()
        await teacher.stop()

    asyncio.run(go())
