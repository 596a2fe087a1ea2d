"""Several answers checked at once: `parse_turn` of each, in few array operations for all of them.

Of a short answer an array operation takes as long as of twenty. Nearly every answer holds every check; where one of
them may not, each is read by itself, and `parse_turn` says what is wrong with it.

Shape letters: N sampled tokens of all answers, one after the other; M kept ids of all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise

import numpy as np

from moe_trm.errors import RecordRejected
from moe_trm.rollout.servers.question import Wanted
from moe_trm.rollout.servers.served_model import ServedModel
from moe_trm.rollout.sglang.answer_form import SHORT_BYTES, Answer, decode_answer
from moe_trm.rollout.sglang.parse import (
    QUOTATION_MARK,
    finish_reason_of,
    parse_turn,
    recomputed_routes,
    sound_logprobs,
    version_spans,
    versions_of,
)
from moe_trm.sampling_mask.record import SamplingMask
from moe_trm.sampling_mask.sound import sound_mask
from moe_trm.types import SampledTurn
from routing import RouteRecord
from routing.sglang import PAYLOAD_DTYPE, sound_payloads


@dataclass(frozen=True)
class Received:
    """An answer as it came, with what `parse_turn` has to know of it."""

    body: bytes
    context: Sequence[int]
    start: int = 0


def parse_turns(received: Sequence[Received], model: ServedModel, wanted: Wanted) -> list[SampledTurn | RecordRejected]:
    """`parse_turn` of each answer; what it raises stands in the place of the turn.

    Turns of short answers hold parts of common arrays.
    """
    short = [one for one in received if len(one.body) <= SHORT_BYTES]
    sound = sound_turns(short, model, wanted) if len(short) > 1 else None
    if sound is None:
        return [_parsed(one, model, wanted) for one in received]
    turns = iter(sound)
    return [next(turns) if len(one.body) <= SHORT_BYTES else _parsed(one, model, wanted) for one in received]


def _parsed(one: Received, model: ServedModel, wanted: Wanted) -> SampledTurn | RecordRejected:
    try:
        return parse_turn(one.body, one.context, model, wanted, start=one.start)
    except RecordRejected as rejection:
        return rejection


def sound_turns(received: Sequence[Received], model: ServedModel, wanted: Wanted) -> list[SampledTurn] | None:
    """The turns of answers that certainly hold every check; None where one of them may not."""
    try:
        answers = [decode_answer(one.body) for one in received]
        reasons = [finish_reason_of(answer, partial=wanted.partial) for answer in answers]
        spans = [version_spans(answer.meta_info, len(answer.output_ids)) for answer in answers]
        again = [
            recomputed_routes(answer.meta_info, own, asked=wanted.routes)
            for answer, own in zip(answers, spans, strict=True)
        ]
    except RecordRejected:
        return None
    sampled = [*chain.from_iterable(answer.output_ids for answer in answers)]
    sizes = [len(answer.output_ids) for answer in answers]
    tokens_N, full_N = np.array(sampled, np.int32), _full_logprobs(answers, sizes, sampled)
    lengths = [len(one.context) for one in received]
    if full_N is None or 0 in sizes or [answer.meta_info.prompt_tokens for answer in answers] != lengths:
        return None
    # As an unsigned number, a negative id is above all others.
    if np.maximum.reduce(tokens_N.view(np.uint32)) >= model.vocab_size:
        return None
    masked = _masks(answers, sizes, tokens_N, model.vocab_size) if wanted.mask else ([None] * len(answers), full_N)
    routes = _routes(received, answers, model) if wanted.routes else [None] * len(answers)
    if masked is None or routes is None:
        return None
    masks, rollout_N = masked
    versions_N, places = versions_of([*chain.from_iterable(spans)]), pairwise(accumulate(sizes, initial=0))
    return [
        SampledTurn(
            tokens=tokens_N[first:last],
            rollout_logprobs=rollout_N[first:last],
            full_logprobs=full_N[first:last],
            versions=versions_N[first:last],
            routes=own_routes,
            sampling_mask=own_mask,
            finish_reason=reason,
            recomputed=recomputed,
            retracted=retracted,
        )
        for (first, last), reason, (recomputed, retracted), own_mask, own_routes in zip(
            places, reasons, again, masks, routes, strict=True
        )
    ]


def _full_logprobs(answers: Sequence[Answer], sizes: list[int], sampled: list[int]) -> np.ndarray | None:
    """`[N]` float32 over the whole vocabulary."""
    entries = [answer.meta_info.output_token_logprobs or [] for answer in answers]
    if list(map(len, entries)) != sizes:
        return None
    values, ids, _ = zip(*chain.from_iterable(entries), strict=True)
    return sound_logprobs(values) if [*ids] == sampled else None


def _masks(
    answers: Sequence[Answer], sizes: Sequence[int], tokens_N: np.ndarray, vocab_size: int
) -> tuple[Iterator[SamplingMask], np.ndarray] | None:
    """The mask of each answer, and the `[N]` log-prob of each sampled token over it."""
    ids_rows: list[list[int]] = []
    logprob_rows: list[list[float | None]] = []
    for answer, size in zip(answers, sizes, strict=True):
        ids, logprobs = answer.meta_info.output_token_sampling_mask, answer.meta_info.output_token_sampling_logprobs
        if ids is None or logprobs is None or len(ids) != size:
            return None
        ids_rows += ids
        logprob_rows += logprobs
    row_sizes = list(map(len, ids_rows))
    if row_sizes != list(map(len, logprob_rows)):
        return None
    logprobs_M = sound_logprobs([*chain.from_iterable(logprob_rows)])
    if logprobs_M is None:
        return None
    ids_M = np.array([*chain.from_iterable(ids_rows)], np.int32)
    found = sound_mask(ids_M, row_sizes, logprobs_M, tokens_N, vocab_size)
    return None if found is None else (_cut(found[0], sizes), found[1])


def _cut(mask: SamplingMask, num_rows: Sequence[int]) -> Iterator[SamplingMask]:
    """`split`, of few rows each."""
    assert mask.logprobs is not None
    ids, logprobs, first = mask.ids, mask.logprobs, 0
    for start, end in pairwise(accumulate(num_rows, initial=0)):
        offsets = mask.offsets[start : end + 1] - first
        last = first + int(offsets[-1])
        yield SamplingMask(ids[first:last], offsets, logprobs[first:last])
        first = last


def _routes(received: Sequence[Received], answers: Sequence[Answer], model: ServedModel) -> list[RouteRecord] | None:
    payloads = [memoryview(answer.meta_info.routed_experts) for answer in answers]
    [dtype, *others] = {answer.meta_info.routed_experts_dtype for answer in answers}
    if others or any(not len(payload) or payload[0] != QUOTATION_MARK for payload in payloads):
        return None
    return sound_payloads(
        [payload[1:-1] for payload in payloads],
        tokens=[[*one.context, *answer.output_ids] for one, answer in zip(received, answers, strict=True)],
        num_layers=model.num_layers,
        layer_ids=model.moe_layer_ids,
        num_experts=model.num_experts,
        top_k=model.top_k,
        starts=[one.start for one in received],
        dtype=dtype or PAYLOAD_DTYPE,
    )
