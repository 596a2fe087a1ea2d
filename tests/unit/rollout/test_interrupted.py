"""A sample that weight pushes cut into pieces: what is asked for, what is joined, and what is rejected."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from moe_trm.errors import RecordRejected
from moe_trm.rollout.server_engine import ServerEngine
from moe_trm.rollout.servers.continuation import continued
from moe_trm.rollout.sessions.conversation import Conversation
from moe_trm.types import Prompt, RolloutRecord, SampledTurn, SamplingParams
from routing import RouteRecord, token_digest
from tests.unit.rollout.local_app import LocalApp
from tests.unit.rollout.test_sglang_engine import HF, config

PROMPT = Prompt("p", (5, 6, 7))
LAYERS, TOP_K = 4, 2


def row(number: int) -> list[list[int]]:
    """`[D, K]` routes of a row: those of any other row differ."""
    return [[(number + layer) % 4, (number + layer + 1) % 4] for layer in range(LAYERS)]


class InterruptedServer(LocalApp):
    """Answers each request with the next piece of one sample; all but the last are aborted.

    Args:
        pieces: tokens of each.
        retractions: of each.
        late: rows that are missing at the start of later pieces.
        aborted: the last piece is aborted, too.
    """

    def __init__(
        self, pieces: Sequence[int], retractions: Sequence[int], late: int = 0, *, aborted: bool = False
    ) -> None:
        self.pieces, self.retractions, self.late, self.aborted = pieces, retractions, late, aborted
        self.starts: list[int] = []

    def routes(self) -> Sequence[web.RouteDef]:
        return [web.post("/generate", self.generate)]

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        number, length = len(self.starts), len(body["input_ids"])
        sampled = self.pieces[number]
        start = body.get("routed_experts_start_len", 0)
        self.starts.append(start)
        rows = [row(place) for place in range(start + (self.late if number else 0), length + sampled - 1)]
        last = number == len(self.pieces) - 1 and not self.aborted
        meta: dict[str, Any] = {
            "finish_reason": {"type": "length" if last else "abort"},
            "prompt_tokens": length,
            "id": body["rid"],
            "num_retractions": self.retractions[number],
            "weight_versions": [{"version": str(number), "start": 0, "end": sampled}],
            "output_token_logprobs": [[-0.5, 3, None]] * sampled,
            "routed_experts": b64encode(np.array(rows, "<i4").tobytes()).decode(),
        }
        answer = {"output_ids": [3] * sampled, "prompt_token_ids": body["input_ids"], "meta_info": meta}
        return web.json_response(answer)


def sample(
    server: InterruptedServer,
    tmp_path: Path,
    missing: str = "reject",
    stop: tuple[int, ...] = (),
    more: int = 0,
    max_attempts: int = 1,
) -> tuple[RolloutRecord, dict[str, float]]:
    async def run() -> tuple[RolloutRecord, dict[str, float]]:
        await server.start()
        settings = config(
            tmp_path,
            {**HF, "mlp_only_layers": []},
            rollout={"url": server.url, "max_attempts": max_attempts, "timeout_s": 5.0},
            pipeline={"mode": "async", "partial": "interrupt"},
            sampling_mask={"mode": "off"},
            replay={"mode": "R3", "missing": missing},
        )
        engine = ServerEngine(settings, "k")
        try:
            # Without a push there is no version to wait for.
            engine._fleet.servers[0].version = engine._fleet._version = 0
            params = SamplingParams(max_new_tokens=sum(server.pieces) + more, stop_token_ids=stop)
            record = await engine.generate(PROMPT, params, sample_id=1, group_id=0)
            return record, engine.metrics()
        finally:
            await engine.close()
            await server.stop()

    return asyncio.run(run())


class SwappingServer(InterruptedServer):
    """Answers each of four requests with the answer to the next one, once all are there."""

    def __init__(self) -> None:
        super().__init__([2], [0])
        self.answers: list[web.Response] = []
        self.all_there = asyncio.Event()

    async def generate(self, request: web.Request) -> web.Response:
        self.starts.clear()
        answer = await super().generate(request)
        place = len(self.answers)
        self.answers.append(answer)
        if len(self.answers) == 4:
            self.all_there.set()
        await self.all_there.wait()
        return self.answers[(place + 1) % 4]


@pytest.mark.parametrize(("questions", "reason"), [(range(4), "other_prompt"), ([0] * 4, "other_request")])
def test_answers_that_were_swapped_are_rejected(questions: Sequence[int], reason: str, tmp_path: Path) -> None:
    """The reward would be of another prompt than the tokens, or one answer be several samples of a prompt."""
    server = SwappingServer()

    async def run() -> list[object]:
        await server.start()
        settings = config(
            tmp_path,
            {**HF, "mlp_only_layers": []},
            rollout={"url": server.url, "max_attempts": 1, "timeout_s": 5.0},
            sampling_mask={"mode": "off"},
            replay={"mode": "R3"},
        )
        engine = ServerEngine(settings, "k")
        try:
            engine._fleet.servers[0].version = engine._fleet._version = 0
            prompts = [Prompt(f"p{token}", (1, token, 2)) for token in questions]
            params = SamplingParams(max_new_tokens=2)
            asks = [engine.generate(prompt, params, sample_id=0, group_id=0) for prompt in prompts]
            return await asyncio.gather(*asks, return_exceptions=True)
        finally:
            await engine.close()
            await server.stop()

    results = asyncio.run(run())
    assert [result.reason for result in results if isinstance(result, RecordRejected)] == [reason] * 4


class FailingServer(InterruptedServer):
    """Fails on each request but the last of three."""

    def __init__(self) -> None:
        super().__init__([2], [0])
        self.ids: list[str] = []

    async def generate(self, request: web.Request) -> web.Response:
        self.ids.append((await request.json())["rid"])
        return await super().generate(request) if len(self.ids) == 3 else web.Response(status=500)


def test_each_attempt_has_an_id_of_its_own(tmp_path: Path) -> None:
    """SGLang refuses one that it still works on."""
    server = FailingServer()
    record, _ = sample(server, tmp_path, max_attempts=3)
    assert record.num_sampled == 2
    begins, places = zip(*(name.split("-") for name in server.ids), strict=True)
    assert (len(set(begins)), places) == (1, ("0", "1", "2"))


def test_each_piece_is_asked_for_from_the_row_that_no_piece_had(tmp_path: Path) -> None:
    server = InterruptedServer([2, 3, 1], [0, 0, 0])
    record, metrics = sample(server, tmp_path)
    assert server.starts == [0, 4, 7]
    assert record.versions.tolist() == [0, 0, 1, 1, 1, 2]
    assert record.routes is not None
    assert record.routes.covered is None
    assert record.routes.experts.tolist() == [row(place) for place in range(8)]
    assert metrics["rollout/retracted"] == 0


@pytest.mark.parametrize(
    ("pieces", "stop", "more", "reason"), [((2, 1), (), 0, "length"), ((2,), (3,), 5, "stop"), ((4,), (3,), 0, "stop")]
)
def test_an_answer_aborted_in_the_step_of_its_last_token_is_whole(
    tmp_path: Path, pieces: tuple[int, ...], stop: tuple[int, ...], more: int, reason: str
) -> None:
    """SGLang fails on a request for no token, or gives one too many."""
    server = InterruptedServer(pieces, [0] * len(pieces), aborted=True)
    record, _ = sample(server, tmp_path, stop=stop, more=more)
    assert len(server.starts) == len(pieces)
    assert (record.num_sampled, record.finish_reason) == (sum(pieces), reason)


def test_pieces_that_do_not_meet_reject_the_sample_and_not_the_run(tmp_path: Path) -> None:
    with pytest.raises(RecordRejected) as caught:
        sample(InterruptedServer([2, 3], [0, 0], late=1), tmp_path)
    assert caught.value.reason == "route_rows"


@pytest.mark.parametrize(
    ("retractions", "first_known"),
    # Tokens 3..9 are sampled; a piece's last row predicts its last token.
    [([1, 0, 0], 3), ([0, 2, 0], 6), ([1, 1, 0], 6), ([0, 0, 1], 8), ([1, 0, 1], 8)],
)
def test_a_retracted_piece_is_rejected_or_loses_its_routes(
    retractions: list[int], first_known: int, tmp_path: Path
) -> None:
    with pytest.raises(RecordRejected) as caught:
        sample(InterruptedServer([2, 3, 2], retractions), tmp_path)
    assert caught.value.reason == "retracted"
    record, metrics = sample(InterruptedServer([2, 3, 2], retractions), tmp_path, missing="native")
    assert record.routes is not None
    assert record.routes.coverage().tolist() == [place >= first_known for place in range(9)]
    assert metrics["rollout/retracted"] == sum(count > 0 for count in retractions)


def test_the_only_token_of_a_piece_was_sampled_after_all_its_retractions(tmp_path: Path) -> None:
    record, metrics = sample(InterruptedServer([2, 3, 1], [0, 0, 1]), tmp_path)
    assert record.routes is not None
    assert record.routes.covered is None
    assert metrics["rollout/retracted"] == 1


def piece(start: int, sampled: int, versions: Sequence[int], recomputed: int, first_row: int) -> SampledTurn:
    """Tokens `start..` of a sample of ids 3, with routes from `first_row` on."""
    total = start + sampled
    experts = np.array([row(place) for place in range(first_row, total - 1)], np.uint8)
    return SampledTurn(
        tokens=np.full(sampled, 3, np.int32),
        rollout_logprobs=np.full(sampled, -0.5, np.float32),
        full_logprobs=np.full(sampled, -0.5, np.float32),
        versions=np.array(versions, np.int32),
        routes=RouteRecord(experts, (0, 1, 2, 3), 4, token_digest(np.array([5, 6, 7, *[3] * (total - 3)]))),
        sampling_mask=None,
        finish_reason="abort",
        recomputed=recomputed,
    )


@pytest.mark.parametrize(("recomputed", "known_from"), [((0, 0), 0), ((1, 0), 3), ((0, 2), 6), ((1, 2), 6)])
def test_recomputed_tokens_of_any_piece_are_those_of_the_whole(recomputed: tuple[int, int], known_from: int) -> None:
    """Of two pieces of two and four tokens, some leading ones were recomputed by a change of weights within."""
    first = piece(3, 2, [0] * recomputed[0] + [1] * (2 - recomputed[0]), recomputed[0], 0)
    second = piece(5, 4, [1] * recomputed[1] + [2] * (4 - recomputed[1]), recomputed[1], 4)
    conversation = Conversation(Prompt("p", (5, 6, 7)))
    conversation.add(continued(first, second))
    if any(recomputed):
        with pytest.raises(RecordRejected) as caught:
            conversation.record(sample_id=0, group_id=0, keep_changed=False)
        assert caught.value.reason == "version_span"
    record = conversation.record(sample_id=0, group_id=0, keep_changed=True)
    assert record.routes is not None
    assert record.routes.coverage().tolist() == [place >= known_from for place in range(8)]


@pytest.mark.parametrize("first_row", [3, 5])
def test_a_continuation_one_row_early_or_late_is_rejected(first_row: int) -> None:
    first, second = piece(3, 2, [0, 0], 0, 0), piece(5, 4, [1] * 4, 0, first_row)
    with pytest.raises(RecordRejected) as caught:
        continued(first, second)
    assert caught.value.reason == "route_rows"


def test_a_continuation_of_another_model_is_rejected() -> None:
    first, second = piece(3, 2, [0, 0], 0, 0), piece(5, 4, [1] * 4, 0, 4)
    assert second.routes is not None
    other = replace(second, routes=second.routes.select((0, 1)))
    with pytest.raises(RecordRejected) as caught:
        continued(first, other)
    assert caught.value.reason == "route_layers"
