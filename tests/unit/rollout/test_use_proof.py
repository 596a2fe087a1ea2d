"""Proof by use: what the gaps say, when it is due, and what follows. Servers are given as what they compute."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from moe_trm.learner.protocol import Scores
from moe_trm.rollout.servers.backend import Array
from moe_trm.rollout.servers.http import EngineHttp
from moe_trm.rollout.servers.use_proof import BOUNDS, NUM_TOKENS, Bounds, ServerUnfit, UseProof, bounds_of, cause, gap
from moe_trm.rollout.sglang.backend import SglangBackend
from moe_trm.step.fixed_texts import FixedTexts
from moe_trm.sync.manifest import ScoredText
from moe_trm.types import TokenBatch
from tests.unit.doubles import StandInLearner

URL = EngineHttp("http://server", None, timeout_s=1, max_attempts=1)
TEXTS = (ScoredText((1, 2, 3), (-1.0, -2.0)), ScoredText((4, 5), (-3.0,)))
BOUND = Bounds(0.1, 0.1)


class Weights(SglangBackend):
    """A server that scores a token id i as -i, shifted by a number for prefill and one for decoding.

    `keeps`: its prefix cache outlives a push. `heals`: a second push mends it.
    """

    def __init__(self, prefill: float = 0.0, decode: float = 0.0, *, keeps: bool = False, heals: bool = False) -> None:
        self.prefill, self.decode, self._keeps, self._heals, self.pushes = prefill, decode, keeps, heals, 0
        self._cache = set[tuple[int, ...]]()

    async def cached(self, http: EngineHttp, token_ids: Sequence[int]) -> int | None:
        known = tuple(token_ids) in self._cache
        self._cache.add(tuple(token_ids))
        return len(token_ids) - 1 if known else 0

    async def decoded(self, http: EngineHttp, token_ids: Sequence[int], count: int) -> tuple[Array, Array]:
        tokens = np.arange(count)
        # The first token is made by the prefill of the context.
        shift = np.where(tokens == 0, self.prefill + 9.0, self.decode)
        return tokens, shift - tokens

    async def prefilled(self, http: EngineHttp, token_ids: Sequence[int]) -> Array:
        known = {2: -1.0, 3: -2.0, 5: -3.0}
        text = len(token_ids) - NUM_TOKENS
        own = [known[token] for token in token_ids[1:text]]
        return np.array([*own, *(-float(token) for token in token_ids[text:])]) + self.prefill

    async def again(self) -> None:
        self.pushes += 1
        if not self._keeps or self._heals:
            self._cache.clear()
        if self._heals:
            self.prefill = self.decode = 0.0


def prove(server: Weights, texts: Sequence[ScoredText] = TEXTS, *, broadcast: bool = False) -> UseProof:
    proof = UseProof(server, BOUND)
    proof.begin(texts)
    again: Callable[[], Awaitable[object]] | None = None if broadcast else server.again

    async def push() -> None:
        await proof.remember(URL)
        if not server._keeps:
            server._cache.clear()
        await proof.prove(URL, again)

    asyncio.run(push())
    return proof


def test_a_server_that_agrees_is_not_given_its_weights_again() -> None:
    server = Weights()
    assert prove(server).metrics() == {
        "weights/decode_gap": 0.0,
        "weights/learner_gap": 0.0,
        "weights/proof_s": pytest.approx(0, abs=10),
    }
    assert server.pushes == 0


def test_a_second_push_may_mend_it() -> None:
    for server in (Weights(decode=0.5, heals=True), Weights(keeps=True, heals=True)):
        prove(server)
        assert server.pushes == 1


@pytest.mark.parametrize(
    ("server", "said"),
    [
        (Weights(decode=0.5), "by 0.5 nats a token: decoding reads stale or damaged weights"),
        (Weights(0.5, 0.5), "its prefill differs from the learner by 0.5 .* and so does decoding: wrong weights"),
        (Weights(prefill=-0.5), "prefill reads wrong weights, and decoding reads others"),
        (Weights(decode=float("nan")), "stale or damaged"),
        (Weights(keeps=True), "2 tokens of a text came from a prefix cache that survived the push"),
    ],
    ids=["stale decoder", "wrong weights", "wrong prefill", "no number", "kept cache"],
)
def test_what_stays_apart_after_a_second_push_is_named(server: Weights, said: str) -> None:
    with pytest.raises(ServerUnfit, match=rf"(?s)also after a second push.*{said}"):
        prove(server)
    assert server.pushes == 1


def test_a_broadcast_cannot_be_given_again() -> None:
    server = Weights(decode=0.5)
    with pytest.raises(ServerUnfit, match="other weights than it holds \\(http"):
        prove(server, broadcast=True)
    assert server.pushes == 0


def test_texts_without_scores_compare_the_engine_with_itself() -> None:
    texts = [ScoredText(text.token_ids) for text in TEXTS]
    assert "weights/learner_gap" not in prove(Weights(0.5, 0.5), texts).metrics()
    with pytest.raises(ServerUnfit, match="stale"):
        prove(Weights(0.5, 0.9), texts)


def test_a_server_that_comes_back_is_proved_between_two_proved_pushes_too() -> None:
    proof = UseProof(Weights(), BOUND)
    assert not proof.due(new=True), "there are no texts yet"
    proof.begin(TEXTS)
    assert proof.due(new=False)
    proof.begin(())
    assert not proof.due(new=False)
    assert proof.due(new=True)
    asyncio.run(proof.prove(URL, None))
    assert proof.learner_gap is None, "the scores were those of another version"


def test_the_coarser_arithmetic_has_the_bounds() -> None:
    assert bounds_of("float32", "float32") == BOUNDS["float32"]
    assert bounds_of("bfloat16", "float32") == bounds_of("float16", "bfloat16") == BOUNDS["bfloat16"]
    assert cause(0.1, 0.1, BOUND) == "" != cause(0.11, None, BOUND)


def test_single_tokens_that_move_by_nats_count_in_float32_alone() -> None:
    """A token that takes another expert does so on a clean server in bfloat16: one such step ended a run."""
    clean, flipped = np.zeros(124), np.zeros(124)
    flipped[::10] = 2.5
    assert gap([(clean, flipped)], median=BOUNDS["bfloat16"].median) == 0
    assert gap([(clean, flipped)], median=BOUNDS["float32"].median) > BOUNDS["bfloat16"].learner
    flipped[::3] = float("nan")
    assert cause(gap([(clean, flipped)], median=True), None, BOUNDS["bfloat16"]), "no number is never clean"


class SecondText(Weights):
    """Only what comes after the second text is decoded with other weights."""

    async def decoded(self, http: EngineHttp, token_ids: Sequence[int], count: int) -> tuple[Array, Array]:
        tokens, logprobs = await super().decoded(http, token_ids, count)
        return tokens, logprobs + (0.5 if tuple(token_ids) == TEXTS[1].token_ids else 0.0)


class SecondPrefill(Weights):
    """Only the second text is scored with other weights."""

    async def prefilled(self, http: EngineHttp, token_ids: Sequence[int]) -> Array:
        scored = await super().prefilled(http, token_ids)
        scored[: len(token_ids) - NUM_TOKENS - 1] += 0.9 if tuple(token_ids[:2]) == TEXTS[1].token_ids else 0.0
        return scored


@pytest.mark.parametrize(("server", "named"), [(SecondText(), "stale or damaged"), (SecondPrefill(), "wrong weights")])
def test_a_fault_that_one_text_alone_shows_is_told(server: Weights, named: str) -> None:
    proof = UseProof(server, Bounds(0.1, 0.1, median=False))
    proof.begin(TEXTS)
    with pytest.raises(ServerUnfit, match=named):
        asyncio.run(proof.prove(URL, None))


class Flips(Weights):
    """Two tokens of each prefill take other experts: the first of the text, and the last of the answer."""

    async def prefilled(self, http: EngineHttp, token_ids: Sequence[int]) -> Array:
        scored = await super().prefilled(http, token_ids)
        scored[[0, -1]] += 2.5
        return scored


def test_a_proof_judges_by_the_statistic_of_its_bounds() -> None:
    texts = [ScoredText((1, 2, 3, 2, 3), (-1.0, -2.0, -1.0, -2.0))]
    for bounds, clean in ((Bounds(0.1, 0.1), True), (Bounds(0.1, 0.1, median=False), False)):
        proof = UseProof(Flips(), bounds)
        proof.begin(texts)
        if clean:
            asyncio.run(proof.prove(URL, None))
        else:
            with pytest.raises(ServerUnfit, match="prefill reads wrong weights, and decoding reads others"):
                asyncio.run(proof.prove(URL, None))
        assert (proof.decode_gap == proof.learner_gap == 0) == clean


class Scorer(StandInLearner):
    """Scores every token as minus its id, and keeps what it was asked."""

    def score(self, batches: Sequence[TokenBatch], sources: Any, **options: Any) -> list[Scores]:
        assert options == {"temperature": 1.0}
        return [Scores(torch.where(batch.mask, -batch.target_ids.float(), 0.0)) for batch in batches]


def test_texts_come_with_the_first_three_pushes_and_every_nth() -> None:
    texts, learner = FixedTexts(50, 5, scored=True), Scorer()
    taken = [texts.take(learner) for _ in range(12)]
    assert [number for number, some in enumerate(taken) if some] == [0, 1, 2, 5, 10]
    for text in taken[10]:
        assert text.logprobs == tuple(-float(token) for token in text.token_ids[1:])
        assert all(0 <= token < 50 for token in text.token_ids)
    assert taken[0] == taken[10]


def test_texts_are_not_scored_where_the_engine_has_other_weights_on_purpose_and_not_sent_where_they_are_off() -> None:
    assert {text.logprobs for text in FixedTexts(50, 1, scored=False).take(StandInLearner())} == {()}
    assert FixedTexts(50, 0, scored=True).take(StandInLearner()) == ()
