"""Parser of SGLang's `/generate`: one JSON answer -> one `SampledTurn`, or the reason of rejection.

No connection, no state.

Shape letters: T tokens, S of them sampled in this answer and the others its context, M kept ids in all.

Reasons of rejection, besides those of `SamplingMask.validate` (`mask_*`) and `routing.RouteError` (`route_*`):

- `malformed` (not the agreed JSON), `aborted`, `empty_output`, `token_range`
- `prompt_length`, `other_prompt`, `other_request`, `image_tokens`
- `logprob_count`, `logprob_ids`, `logprob_value` (not finite, or positive)
- `version_missing`, `version_unknown`, `mask_missing`, `route_missing`, `retraction_unknown`
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Annotated, Any

import msgspec
import numpy as np

from moe_trm.errors import RecordRejected
from moe_trm.rollout.servers.answer_checks import (
    check_image_tokens,
    check_prompt,
    check_request,
    checked_logprobs,
    over_support,
    sampled_ids,
)
from moe_trm.rollout.servers.ownership import version_of
from moe_trm.rollout.servers.question import RequestedFields
from moe_trm.rollout.servers.served_model import ServedModel
from moe_trm.rollout.turn import routes_rejected
from moe_trm.sampling_mask.record import SamplingMask
from moe_trm.sampling_mask.violation import Violation, drop, outside, union
from moe_trm.types import SampledTurn
from routing import RouteError, RouteRecord
from routing.sglang import PAYLOAD_DTYPE, decode_payload

QUOTATION_MARK = ord('"')

Int32 = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]


class FinishReason(msgspec.Struct):
    """The end of generation: `stop`, `length` or `abort`."""

    type: str
    message: str = ""


class VersionSpan(msgspec.Struct):
    """Output tokens `start..end` (end excluded) were sampled with weights `version`."""

    version: str
    start: Int32
    end: Int32


class MetaInfo(msgspec.Struct):
    """The fields of `meta_info` that are read. JSON has no NaN: the engine sends null for it."""

    finish_reason: FinishReason | None
    id: str = ""
    """Of the request; SGLang makes one up for a request without."""
    prompt_tokens: int | None = None
    """Missing in the answer of a request that was aborted while it waited in the queue."""
    output_token_logprobs: list[tuple[float | None, Int32, Any]] | None = None
    weight_versions: list[VersionSpan] | None = None
    num_retractions: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Times that the engine dropped the keys and values of this request and computed them, and its routes, again."""
    output_token_sampling_mask: list[list[Int32]] | None = None
    output_token_sampling_logprobs: list[list[float | None]] | None = None
    output_top_logprobs: list[list[tuple[float | None, Int32, Any]] | None] | None = None
    routed_experts_dtype: str | None = None
    """Type of the ids in `routed_experts`; engines that do not name it send int32 (sglang#31219)."""
    routed_experts: msgspec.Raw = msgspec.Raw()
    """The routes as they are in the answer, which they nearly fill: a copy would double the memory of a sample."""


class Answer(msgspec.Struct):
    """One element of `/generate`: the fields that are read."""

    output_ids: list[Int32]
    meta_info: MetaInfo
    prompt_token_ids: list[Int32] | None = None


def parse_turn(
    body: bytes | memoryview,
    context: Sequence[int],
    model: ServedModel,
    requested: RequestedFields,
    *,
    start: int = 0,
    request_id: str = "",
) -> SampledTurn:
    """Check one answer to `context` against every invariant that it can break by itself.

    `start` is the first row of the routes that were asked for; the request's id began with `request_id`. Raises
    `RecordRejected` with one of the reasons of this module's docstring.
    """
    answer = decode_answer(body)
    finish_reason = _finish_reason(answer, partial=requested.partial)
    output_S = _output_ids(answer, context, model, requested)
    check_request(answer.meta_info.id, request_id)
    full_S = _full_logprobs(answer)
    mask, rollout_S = None, full_S
    if requested.mask:
        mask, rollout_S = _sampling_mask(answer, output_S, full_S, model.vocab_size, requested.violation)
    spans = _version_spans(answer.meta_info, len(output_S), requested.run)
    recomputed, retracted = _recomputed_routes(answer.meta_info, spans, asked=requested.routes)
    return SampledTurn(
        tokens=output_S,
        rollout_logprobs=rollout_S,
        full_logprobs=full_S,
        versions=_versions(spans),
        routes=_routes(answer, context, model, start) if requested.routes else None,
        sampling_mask=mask,
        finish_reason=finish_reason,
        recomputed=recomputed,
        retracted=retracted,
    )


def decode_answer(body: bytes | memoryview) -> Answer:
    """The typed answer. Raises `RecordRejected` (`malformed`)."""
    try:
        return _DECODER.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RecordRejected(
            "malformed",
            "the engine's answer is not what was agreed",
            got=str(error),
            expected="the answer of SGLang 0.5.23's /generate",
        ) from error


def _finish_reason(answer: Answer, *, partial: bool) -> str:
    """The finish reason. Raises `RecordRejected` where that is not the end of a record."""
    reason = answer.meta_info.finish_reason
    if reason is None or reason.type not in ("stop", "length", "abort"):
        raise RecordRejected(
            "malformed", "unknown finish reason", got=reason and reason.type, expected="stop, length or abort"
        )
    # Aborted in the queue, the first time or after a retraction: without routes and counts, whatever it had sampled.
    queued = answer.meta_info.prompt_tokens is None
    if reason.type == "abort" and (queued or not (partial and answer.output_ids)):
        raise RecordRejected("aborted", "the engine aborted the request", got=reason.message or None)
    return reason.type


def _output_ids(answer: Answer, context: Sequence[int], model: ServedModel, requested: RequestedFields) -> np.ndarray:
    if model.image is not None:
        check_image_tokens(answer.prompt_token_ids, answer.output_ids, context, model)
    if answer.meta_info.prompt_tokens != len(context):
        raise RecordRejected(
            "prompt_length", "the engine saw another prompt", got=answer.meta_info.prompt_tokens, expected=len(context)
        )
    # A router that drops this field drops routes and masks as well, and is refused where they are asked for.
    if answer.prompt_token_ids is not None or requested.routes or requested.mask:
        check_prompt(answer.prompt_token_ids, context)
    return sampled_ids(answer.output_ids, model.vocab_size)


def _full_logprobs(answer: Answer) -> np.ndarray:
    entries, output_ids = answer.meta_info.output_token_logprobs or [], answer.output_ids
    if len(entries) != len(output_ids):
        raise RecordRejected(
            "logprob_count", "not one log-prob per sampled token", got=len(entries), expected=len(output_ids)
        )
    ids = [token for _, token, _ in entries]
    if ids != output_ids:
        position = next(
            place
            for place, (token_id, output_id) in enumerate(zip(ids, output_ids, strict=True))
            if token_id != output_id
        )
        raise RecordRejected(
            "logprob_ids",
            "a log-prob belongs to another token",
            where=f"position {position}",
            got=ids[position],
            expected=output_ids[position],
        )
    return checked_logprobs([value for value, _, _ in entries], "logprob_value")


def _version_spans(meta: MetaInfo, num_sampled: int, run: str) -> list[tuple[int, int]]:
    """Versions of the sampled tokens, in their order, with the number of tokens of each."""
    spans = meta.weight_versions or []
    starts, ends = [span.start for span in spans], [span.end for span in spans]
    contiguous = starts == [0, *ends[:-1]] and all(start < end for start, end in zip(starts, ends, strict=True))
    if not spans or not contiguous or ends[-1] != num_sampled:
        raise RecordRejected(
            "version_missing",
            "weight versions do not cover the sampled tokens",
            got=[(span.version, span.start, span.end) for span in spans],
            expected=f"spans from 0 to {num_sampled} without gap or overlap",
        )
    return [(version_of(span.version, run), span.end - span.start) for span in spans]


def _versions(spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """`[S]` int32 of `_version_spans`."""
    versions, lengths = zip(*spans, strict=True)
    return np.repeat(np.array(versions, np.int32), lengths)


def _recomputed_routes(meta: MetaInfo, spans: Sequence[tuple[int, int]], *, asked: bool) -> tuple[int, bool]:
    """`SampledTurn.recomputed` and `SampledTurn.retracted`.

    Routes that were `asked` for must come with the number of retractions: the engine computed them again then, beside
    log-probs of the first time. Raises `RecordRejected` otherwise.

    Source: SGLang 0.5.23, `meta_info.num_retractions`; sglang#39633, miles#3277.
    """
    last = spans[-1][0]
    earlier = sum(length for version, length in spans if version != last)
    if not asked:
        return earlier, False
    if meta.num_retractions is None:
        raise RecordRejected(
            "retraction_unknown",
            "the engine does not say whether it computed these routes a second time",
            got="no num_retractions in the answer",
            expected="their number",
            fix="Serve with SGLang 0.5.23.",
        )
    if not meta.num_retractions:
        return earlier, False
    # Where a retraction fell is not said. The row that predicts the last token was computed after all of them.
    return sum(length for _, length in spans) - 1, not earlier


def _sampling_mask(
    answer: Answer, output_S: np.ndarray, full_S: np.ndarray, vocab_size: int, violation: Violation
) -> tuple[SamplingMask, np.ndarray]:
    """The mask, and the `[S]` log-prob of each sampled token over it."""
    meta = answer.meta_info
    ids_rows, logprob_rows = meta.output_token_sampling_mask, meta.output_token_sampling_logprobs
    if ids_rows is None or logprob_rows is None:
        raise RecordRejected(
            "mask_missing",
            "no sampling mask in the answer",
            expected="output_token_sampling_mask and its log-probs",
            fix="top_k must be 1..4096.",
        )
    sizes, logprob_sizes = list(map(len, ids_rows)), list(map(len, logprob_rows))
    if sizes != logprob_sizes:
        raise RecordRejected(
            "mask_shape", "kept ids and their log-probs differ in number", got=logprob_sizes, expected=sizes
        )
    ids_M = np.fromiter(chain.from_iterable(ids_rows), np.int32, count=sum(sizes))
    logprobs_M = checked_logprobs(list(chain.from_iterable(logprob_rows)), "mask_logprob")
    mask = SamplingMask(ids_M, np.cumsum([0, *sizes], dtype=np.int64), logprobs_M).ascending()
    mask = _checked_mask(meta, mask, output_S, full_S, vocab_size, violation)
    return mask, over_support(mask, output_S, full_S)


def _checked_mask(
    meta: MetaInfo,
    mask: SamplingMask,
    output_S: np.ndarray,
    full_S: np.ndarray,
    vocab_size: int,
    violation: Violation,
) -> SamplingMask:
    """The mask after every check, with violations treated as asked for."""
    regular = violation != "reject" and mask.num_rows == len(output_S) and np.diff(mask.offsets).min() > 0
    wrong_S = outside(mask, output_S) if regular else np.zeros(0, bool)
    if not wrong_S.any() or (violation == "drop" and wrong_S.all()):
        mask.validate(output_S, vocab_size)
        return mask
    if violation == "drop":
        mask.validate(np.where(wrong_S, mask.ids[mask.offsets[:-1]], output_S), vocab_size)
        return drop(mask, wrong_S)
    mask = union(mask, wrong_S, output_S, full_S, _log_mass(meta, mask, wrong_S)).ascending()
    mask.validate(output_S, vocab_size)
    return mask


def _log_mass(meta: MetaInfo, mask: SamplingMask, wrong_S: np.ndarray) -> np.ndarray:
    """`[S]` log of the vocabulary's probability of each mask where `wrong_S`.

    The likeliest id is in every mask, and both its log-probs are known.
    """
    assert mask.logprobs is not None
    log_mass = np.zeros(mask.num_rows)
    entries = meta.output_top_logprobs or []
    for place in np.flatnonzero(wrong_S).tolist():
        row = slice(mask.offsets[place], mask.offsets[place + 1])
        top = entries[place] if place < len(entries) else None
        same = mask.ids[row] == top[0][1] if top else np.zeros(0, bool)
        if not top or same.sum() != 1 or top[0][0] is None:
            raise RecordRejected(
                "mask_violation",
                "the sampled token is outside its own sampling mask, and the mask's probability is not known",
                where=f"position {place}",
                got=top,
                expected="the likeliest id with its log-prob",
            )
        log_mass[place] = top[0][0] - mask.logprobs[row][same][0]
    return log_mass


def _routes(answer: Answer, context: Sequence[int], model: ServedModel, start: int) -> RouteRecord:
    meta, payload = answer.meta_info, memoryview(answer.meta_info.routed_experts)
    if not len(payload) or payload[0] != QUOTATION_MARK:
        raise RecordRejected(
            "route_missing",
            "no routes in the answer",
            expected="routed_experts",
            fix="Start the server with --enable-return-routed-experts.",
        )
    try:
        return decode_payload(
            payload[1:-1],
            tokens=np.array([*context, *answer.output_ids], np.int32),
            num_layers=model.num_layers,
            layer_ids=model.moe_layer_ids,
            num_experts=model.num_experts,
            top_k=model.top_k,
            start=start,
            dtype=meta.routed_experts_dtype or PAYLOAD_DTYPE,
        )
    except RouteError as error:
        raise routes_rejected(error) from error


_DECODER = msgspec.json.Decoder(Answer)
