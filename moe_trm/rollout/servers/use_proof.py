"""Proof by use: what a server decodes comes from the weights that it was given, and they are the learner's.

A checksum proves the tensors in a server's parameters. Decoding may read others: a CUDA graph goes on with memory that
was replaced, a packed copy was made once and not again. So each server decodes fixed texts greedily, and scores the
same tokens by prefill, which reads the parameters anew:

- decode gap: |log p_decode - log p_prefill| over the decoded tokens, the first left out, as prefill makes it;
- learner gap: |log p_prefill - log p_learner| over the tokens of the texts.

Answers also continue prefixes from a cache. One text lies in it before the push, and must not come from it after: then
its states are of older weights. It is decoded again when it has come back with the new ones.

Both gaps are in nats, at temperature 1: the mean in float32, the median in coarser arithmetic. There a clean token that
takes another expert moves by whole nats, and a few of them make the mean of a clean server as large as that of a fault.
A change of the weights that moves log-probs by less than the bounds is not seen, nor, in coarser arithmetic, one that
moves fewer than half of the tokens.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from moe_trm.errors import SyncError
from moe_trm.rollout.servers.backend import Array, ServerBackend
from moe_trm.rollout.servers.http import EngineHttp
from moe_trm.sync.manifest import ScoredText

NUM_TOKENS = 16
"""Decoded after each text."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Bounds:
    """Largest gaps of a server that computes with the right weights, nats a token, by mean or by median."""

    decode: float
    learner: float
    median: bool = True


BOUNDS = {"float32": Bounds(1e-3, 1e-3, median=False), "float16": Bounds(0.05, 0.1), "bfloat16": Bounds(0.1, 0.25)}
"""By the coarser arithmetic of engine and learner. They are wide, as a false alarm stops a run:
`python -m benchmarks.use_proof` measures the gaps of clean runs."""


def bounds_of(*dtypes: str) -> Bounds:
    """The bounds of the coarsest of these arithmetics."""
    return BOUNDS[max(dtypes, key=list(BOUNDS).index)]


class ServerUnfit(SyncError):
    """A server computes with other weights than it was given, and did so again after they were given to it again."""

    may_pass = False


class UseProof:
    """Proves pushes by use, server by server. Pushes have texts where the backend's trait `scores_tokens` is set.

    `decode_gap`, `learner_gap` and `seconds` are of the last proof; None before it, and where the learner had no
    scores.
    """

    def __init__(self, backend: ServerBackend, bounds: Bounds) -> None:
        self._backend, self._bounds = backend, bounds
        self._texts: tuple[ScoredText, ...] = ()
        self._due = False
        self.decode_gap: float | None = None
        self.learner_gap: float | None = None
        self.seconds: float | None = None

    def begin(self, texts: Sequence[ScoredText]) -> None:
        """A push begins. Without `texts` it is not proved by use, except on servers that were lost."""
        self._due = bool(texts)
        self._texts = tuple(texts) or tuple(ScoredText(text.token_ids) for text in self._texts)

    def due(self, *, new: bool) -> bool:
        """True where a server has to be proved by use. `new`: it had no weights of this run, or lost them."""
        return bool(self._texts) and (self._due or new)

    def metrics(self) -> dict[str, float]:
        """The last proof: `weights/decode_gap`, `weights/learner_gap` in nats a token, `weights/proof_s` in seconds."""
        figures = {
            "weights/decode_gap": self.decode_gap,
            "weights/learner_gap": self.learner_gap,
            "weights/proof_s": self.seconds,
        }
        return {name: value for name, value in figures.items() if value is not None}

    async def remember(self, http: EngineHttp) -> None:
        """Leave a text in the prefix cache, which the push that comes next has to empty. Raises `EngineError`."""
        await self._backend.cached(http, self._texts[0].token_ids)

    async def prove(self, http: EngineHttp, again: Callable[[], Awaitable[object]] | None) -> None:
        """Return when decoding, prefill and learner agree on this server, which has the weights.

        `again` gives them to it once more, where that is possible. Raises `ServerUnfit` where they do not agree even
        after that, `EngineError` for no answer.
        """
        fault = await self._fault(http)
        if fault and again is not None:
            log.warning("rollout server %s: %s; it is given the weights again", http.url, fault)
            await again()
            fault = await self._fault(http)
        if fault:
            raise ServerUnfit(
                "the rollout server computes with other weights than it holds"
                + (", also after a second push" if again is not None else ""),
                where=http.url,
                got=fault,
                expected=f"at most {self._bounds.decode:g} nats a token between decoding and prefill, and "
                f"{self._bounds.learner:g} between prefill and learner; no token from a cache older than the push",
                fix="Start the server without CUDA graphs, fused copies of weights or prefix cache, or with another "
                "version of the engine. sync.prove_every=0 leaves this proof out, and samples may come from other "
                "weights then.",
            )

    async def _fault(self, http: EngineHttp) -> str:
        """The cause of a disagreement in words; empty: there is none."""
        started = time.perf_counter()
        survived = await self._backend.cached(http, self._texts[0].token_ids)
        answers = await asyncio.gather(
            *(self._backend.decoded(http, text.token_ids, NUM_TOKENS) for text in self._texts)
        )
        prefills = await asyncio.gather(
            *(
                self._backend.prefilled(http, [*text.token_ids, *tokens.tolist()])
                for text, (tokens, _) in zip(self._texts, answers, strict=True)
            )
        )
        pairs = zip(answers, prefills, strict=True)
        decoded = [(decoded_ids[1:], scored[1 - NUM_TOKENS :]) for (_, decoded_ids), scored in pairs]
        self.decode_gap = gap(decoded, median=self._bounds.median)
        scored_pairs = [
            (np.array(text.logprobs), scored[:-NUM_TOKENS])
            for text, scored in zip(self._texts, prefills, strict=True)
            if text.logprobs
        ]
        self.learner_gap = gap(scored_pairs, median=self._bounds.median) if scored_pairs else None
        self.seconds = time.perf_counter() - started
        if survived:
            return (
                f"{survived} tokens of a text came from a prefix cache that survived the push: states of older weights"
            )
        return cause(self.decode_gap, self.learner_gap, self._bounds)


def gap(pairs: Iterable[tuple[Array, Array]], *, median: bool) -> float:
    """Median or mean absolute difference over the tokens of all pairs, nats.

    Raises `ValueError` for other lengths.
    """
    differences = np.concatenate([np.abs(np.subtract(first, second)) for first, second in pairs])
    return float(np.median(differences) if median else np.mean(differences))


def cause(decode_gap: float, learner_gap: float | None, bounds: Bounds) -> str:
    """The fault that the two gaps show, in words; empty: none. A gap that is not a number is a fault."""
    decodes_alike = decode_gap <= bounds.decode
    scores_alike = learner_gap is None or learner_gap <= bounds.learner
    decoded = f"decoding differs from the same engine's prefill by {decode_gap:.2g} nats a token"
    scored = f"its prefill differs from the learner by {learner_gap or 0:.2g} nats a token"
    if decodes_alike and scores_alike:
        return ""
    if scores_alike:
        return f"{decoded}: decoding reads stale or damaged weights"
    if decodes_alike:
        return f"{scored}, and so does decoding: wrong weights or another configuration"
    return f"{decoded}, and {scored}: prefill reads wrong weights, and decoding reads others"
