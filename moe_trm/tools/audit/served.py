"""A server by itself: fixed texts are prefilled and decoded there, again, after a flush, and beside others.

Decoding, prefill and the plain model give log-probs of the same tokens, so what disagrees is named:

- decode against prefill: decoding reads other weights, as of a captured graph or a packed copy that was not made again;
- prefill against the model: other weights or another configuration;
- decoding again, and after a flush of the prefix cache: memory that is read before it is written, and states in the
  cache that are of older weights;
- the same prefill with others at the same time: what batches change.

Distances are medians over tokens of the absolute difference, in nats at temperature 1: in coarse arithmetic a token
that takes another expert moves by whole nats. The bounds are those of the proof by use.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moe_trm.rollout.servers.backend import Array, ServerBackend
from moe_trm.rollout.servers.http import EngineHttp, HttpStatusError
from moe_trm.rollout.servers.use_proof import NUM_TOKENS, Bounds, cause, gap
from moe_trm.tools.audit.audit_answer import AuditAnswer
from moe_trm.tools.audit.dump import AuditRow
from moe_trm.tools.audit.reference import ReferenceModel

Decoded = tuple[Array, Array]
QUESTION = "engine"
TEXTS, LONGEST = 8, 512
"""Texts at most, and tokens of one."""
BATCHES = (2, 8, 32)
"""Requests at the same time."""
FIXES = {
    "decoding": "start the server without CUDA graphs or fused copies of weights, or take another version of it",
    "weights": "compare the weights that the engine holds with the checkpoint, tensor by tensor",
    "cache": "start the server without prefix cache, and flush it with every push",
    "batches": "look for a kernel whose result depends on its batch, such as a padded or fused one",
    "repeats": "look for memory that is read before it is written: the same request gave two answers",
}


@dataclass(frozen=True)
class ServerAnswers:
    """Answers of a server: log-probs of each text, `[T - 1]` and of the decoded tokens behind it.

    Attributes:
        texts: token ids.
        decoded: the decoded ids of each text and their log-probs by decoding.
        again, flushed: the same once more, and after a flush of the prefix cache; None where it was not flushed.
        prefilled: log-probs by one prefill of the text and what was decoded behind it.
        beside: the same with so many requests at a time.
    """

    texts: Sequence[Sequence[int]]
    decoded: Sequence[Decoded]
    again: Sequence[Decoded]
    flushed: Sequence[Decoded] | None
    prefilled: Sequence[Array]
    beside: Mapping[int, Sequence[Array]]


def texts_of(rows: Sequence[AuditRow]) -> list[list[int]]:
    """Tokens of the first rows, as the dump has them; the beginning of long ones."""
    return [row.tokens[:LONGEST].tolist() for row in rows[:TEXTS]]


async def ask_server(backend: ServerBackend, http: EngineHttp, texts: Sequence[Sequence[int]]) -> ServerAnswers:
    """All that is asked. Raises `EngineError` where the server does not answer."""

    async def decode() -> list[Decoded]:
        return [await backend.decoded(http, ids, NUM_TOKENS) for ids in texts]

    decoded, again = await decode(), await decode()
    flushed = await decode() if await _flush(backend, http) else None
    whole = [[*ids, *tokens.tolist()] for ids, (tokens, _) in zip(texts, decoded, strict=True)]
    prefilled = [await backend.prefilled(http, ids) for ids in whole]
    beside = {size: await _together(lambda ids: backend.prefilled(http, ids), whole, size) for size in BATCHES}
    return ServerAnswers(texts, decoded, again, flushed, prefilled, beside)


async def _flush(backend: ServerBackend, http: EngineHttp) -> bool:
    """False also where the server refuses, as one that is busy does."""
    try:
        return await backend.flush(http)
    except HttpStatusError:
        return False


async def _together(ask: Callable[[Sequence[int]], Awaitable[Array]], texts: Sequence[Any], size: int) -> list[Array]:
    """The texts with `size` requests at a time, of which those beyond the texts are the same ones again."""
    answers: list[Array] = []
    for first in range(0, len(texts), size):
        part = [texts[(first + place) % len(texts)] for place in range(size)]
        answers += (await asyncio.gather(*(ask(ids) for ids in part)))[: min(size, len(texts) - first)]
    return answers


def judge_server(answers: ServerAnswers, model: ReferenceModel, bounds: Bounds) -> list[AuditAnswer]:
    """The disagreements, and the causes that were excluded."""
    decoding = [
        (logprobs[1:], scored[1 - NUM_TOKENS :])
        for (_, logprobs), scored in zip(answers.decoded, answers.prefilled, strict=True)
    ]
    plain = [model.logprobs(ids) for ids in answers.texts]
    of_model = [(ours, scored[: len(ours)]) for ours, scored in zip(plain, answers.prefilled, strict=True)]
    sizes = {"decoding": gap(decoding, median=True), "weights": gap(of_model, median=True)}
    sizes["repeats"] = _apart(answers.decoded, answers.again)
    if answers.flushed is not None:
        sizes["cache"] = max(_apart(part, answers.flushed) for part in (answers.decoded, answers.again))
    sizes["batches"] = max(
        gap(zip(answers.prefilled, part, strict=True), median=True) for part in answers.beside.values()
    )
    words = (
        f"Median distances in nats: decoding to prefill {sizes['decoding']:.1e}, prefill to the model "
        f"{sizes['weights']:.1e}; decoding again {sizes['repeats']:.1e}, "
        + (f"after a flush {sizes['cache']:.1e}, " if "cache" in sizes else "the cache was not flushed, ")
        + f"prefill with {', '.join(map(str, answers.beside))} at a time {sizes['batches']:.1e}."
    )
    figures = {f"{name}_gap": size for name, size in sizes.items()}
    judged = sum(map(len, answers.prefilled))
    limits = {name: bounds.learner if name == "weights" else bounds.decode for name in sizes}
    faults = [name for name, size in sizes.items() if not size <= limits[name]]
    if not faults:
        excluded = f"Excluded: faults that move half of the {judged} tokens by more than {bounds.decode:g} nats."
        return [AuditAnswer(QUESTION, "none", "ok", words, judged=judged, figures=figures, excluded=excluded)]
    found = cause(sizes["decoding"], sizes["weights"], bounds)
    return [
        AuditAnswer(
            QUESTION,
            name,
            "fail",
            f"{found.capitalize()}. {words}" if name in ("decoding", "weights") else words,
            FIXES[name],
            judged=judged,
            figures=figures,
        )
        for name in faults
    ]


def _apart(first: Sequence[Decoded], second: Sequence[Decoded]) -> float:
    """Median distance of the tokens up to the first that differs; infinite where most texts differ at once."""
    pairs = []
    for (ids, logprobs), (other_ids, other_logprobs) in zip(first, second, strict=True):
        same = int(np.argmin([*(ids == other_ids), False]))
        pairs.append((logprobs[:same], other_logprobs[:same]))
    if 2 * sum(len(part) > 0 for part, _ in pairs) <= len(pairs):
        return float("inf")
    return gap(pairs, median=True)
