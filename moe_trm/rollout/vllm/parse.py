"""Parser of vLLM's `/inference/v1/generate`: one JSON answer -> one `SampledTurn`, or the reason of rejection.

No connection, no state. `weight_version` and `prompt_token_ids` are of `packages/vllm_worker`: the answer has one
version, because weights are loaded while nothing is sampled.

Shape letters: T tokens, S of them sampled in this answer, M kept ids in all.

Reasons of rejection, besides those of `SamplingMask.validate` (`mask_*`) and `routing.RouteError` (`route_*`):

- `malformed` (not the agreed JSON), `aborted`, `empty_output`, `prompt_length`, `other_prompt`, `token_range`
- `logprob_count`, `logprob_ids`, `logprob_value` (none, not finite, or positive)
- `version_unknown`, `mask_missing`, `clipped` (vLLM ends an answer without a word where the context is full)
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np

from moe_trm.errors import RecordRejected
from moe_trm.rollout.servers.answer_checks import check_prompt, checked_logprobs, over_support, sampled_ids
from moe_trm.rollout.servers.ownership import version_of
from moe_trm.rollout.servers.question import Question
from moe_trm.rollout.servers.served_model import ServedModel
from moe_trm.rollout.turn import routes_rejected
from moe_trm.rollout.vllm.request import LISTED_IDS
from moe_trm.sampling_mask.record import SamplingMask
from moe_trm.sampling_mask.vllm import decode_mask
from moe_trm.types import SampledTurn
from routing import RouteError, RouteRecord
from routing.vllm import decode_payload

NO_LOGPROB = -9999.0
"""vLLM writes this, or less, for a log-prob that it does not have and for one of minus infinity."""
NAMED = "token_id:"
"""Beginning of the text by which vLLM names an id."""
Int32 = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]


class LikelyId(msgspec.Struct):
    """An id and its log-prob."""

    token: str
    logprob: float


class SampledId(msgspec.Struct):
    """A sampled id, its log-prob, and the likeliest ids at its position."""

    token: str
    logprob: float
    top_logprobs: list[LikelyId] = []


class ListedLogprobs(msgspec.Struct):
    """The log-probs of the sampled ids."""

    content: list[SampledId] | None = None


class VllmChoice(msgspec.Struct):
    """The fields of a choice that are read."""

    token_ids: list[Int32]
    finish_reason: str | None
    logprobs: ListedLogprobs | None = None
    routed_experts: str | None = None
    sampling_mask: list[list[Int32]] | None = None


class TokenCounts(msgspec.Struct):
    """Numbers of tokens."""

    prompt_tokens: int


class VllmAnswer(msgspec.Struct):
    """The fields of an answer that are read."""

    choices: list[VllmChoice]
    usage: TokenCounts
    weight_version: str
    prompt_token_ids: list[Int32]


def parse_turn(body: bytes | memoryview, question: Question, model: ServedModel) -> SampledTurn:
    """Check one answer against every invariant that it can break by itself. Raises `RecordRejected` as this module
    says.

    Log-probs belong to the distribution that was sampled from: `--logprobs-mode processed_logprobs`. Where it is
    truncated, the probability of the kept ids in the vocabulary is not told, and `full_logprobs` is NaN.
    """
    answer, fields = _decoded(body), question.requested
    [choice] = answer.choices
    finish_reason = _finish_reason(choice, partial=fields.partial)
    if answer.usage.prompt_tokens != len(question.context):
        raise RecordRejected(
            "prompt_length",
            "the engine saw another prompt",
            got=answer.usage.prompt_tokens,
            expected=len(question.context),
        )
    check_prompt(answer.prompt_token_ids, question.context)
    output_S = sampled_ids(choice.token_ids, model.vocab_size)
    if finish_reason == "length" and len(output_S) != question.params.max_new_tokens:
        raise RecordRejected(
            "clipped",
            "the engine ended the answer before its limit: the context is full",
            got=f"{len(output_S)} tokens after {len(question.context)}",
            expected=question.params.max_new_tokens,
            fix="Lower rollout.max_new_tokens, or bound samples with rollout.max_tokens.",
        )
    sampled_S = _logprobs(choice)
    mask, rollout_S = None, sampled_S
    if fields.mask:
        mask = _mask(choice, output_S, question, model.vocab_size)
        rollout_S = sampled_S if mask.logprobs is None else over_support(mask, output_S, sampled_S)
    version = version_of(answer.weight_version, fields.run)
    truncated = question.params.top_p < 1 or question.params.min_p > 0 or question.params.top_k < model.vocab_size
    return SampledTurn(
        tokens=output_S,
        rollout_logprobs=rollout_S,
        full_logprobs=np.full_like(sampled_S, np.nan) if truncated else sampled_S,
        versions=np.full(len(output_S), version, np.int32),
        routes=_routes(choice, question, model) if fields.routes else None,
        sampling_mask=mask,
        finish_reason=finish_reason,
    )


def _decoded(body: bytes | memoryview) -> VllmAnswer:
    try:
        answer = _DECODER.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _malformed(str(error)) from error
    if len(answer.choices) != 1:
        raise _malformed(f"{len(answer.choices)} choices")
    return answer


def _malformed(got: str) -> RecordRejected:
    return RecordRejected(
        "malformed",
        "the engine's answer is not what was agreed",
        got=got,
        expected="one choice of vLLM 0.30's /inference/v1/generate, with the label of packages/vllm_worker",
    )


def _finish_reason(choice: VllmChoice, *, partial: bool) -> str:
    """The finish reason. Raises `RecordRejected` where that is not the end of a record."""
    if choice.finish_reason not in ("stop", "length", "abort"):
        raise _malformed(f"finish reason {choice.finish_reason}")
    if choice.finish_reason == "abort" and not (partial and choice.token_ids):
        raise RecordRejected("aborted", "the engine aborted the request")
    return choice.finish_reason


def _logprobs(choice: VllmChoice) -> np.ndarray:
    """`[S]` of the sampled ids."""
    entries = (choice.logprobs.content if choice.logprobs else None) or []
    if len(entries) != len(choice.token_ids):
        raise RecordRejected(
            "logprob_count", "not one log-prob per sampled token", got=len(entries), expected=len(choice.token_ids)
        )
    for place, (entry, token) in enumerate(zip(entries, choice.token_ids, strict=True)):
        if entry.token != f"{NAMED}{token}":
            raise RecordRejected(
                "logprob_ids",
                "a log-prob belongs to another token",
                where=f"position {place}",
                got=entry.token,
                expected=f"{NAMED}{token}",
            )
    values = [entry.logprob if entry.logprob > NO_LOGPROB else None for entry in entries]
    return checked_logprobs(values, "logprob_value")


def _mask(choice: VllmChoice, output_S: np.ndarray, question: Question, vocab_size: int) -> SamplingMask:
    """Kept ids: those that the engine names, else the likeliest top-k ids that have a probability."""
    if choice.sampling_mask is not None:
        return decode_mask(choice.sampling_mask, sampled_ids=output_S, vocab_size=vocab_size)
    if question.params.top_k > LISTED_IDS:
        raise RecordRejected(
            "mask_missing",
            "the answer has no sampling mask, and top-k is too large to tell it from log-probs",
            got=f"top_k={question.params.top_k}",
            expected=f"at most {LISTED_IDS}, or a server with --return-sampling-mask",
        )
    content = (choice.logprobs.content if choice.logprobs else None) or []
    rows = [[likely for likely in entry.top_logprobs if likely.logprob > NO_LOGPROB] for entry in content]
    flat = [likely for row in rows for likely in row]
    logprobs_M = checked_logprobs([likely.logprob for likely in flat], "mask_logprob")
    ids_M = np.array([_id(likely.token) for likely in flat], np.int32)
    mask = SamplingMask(ids_M, np.cumsum([0, *map(len, rows)], dtype=np.int64), logprobs_M).ascending()
    mask.validate(output_S, vocab_size)
    return mask


def _id(token: str) -> int:
    number = token.removeprefix(NAMED)
    if number == token or not number.isdecimal() or len(number) > 9:
        raise _malformed(f"an id named {token}")
    return int(number)


def _routes(choice: VllmChoice, question: Question, model: ServedModel) -> RouteRecord:
    tokens = np.array([*question.context, *choice.token_ids], np.int32)
    try:
        return decode_payload(
            choice.routed_experts,
            tokens=tokens,
            num_layers=model.num_layers,
            layer_ids=model.moe_layer_ids,
            num_experts=model.num_experts,
            top_k=model.top_k,
            start=question.start,
        )
    except RouteError as error:
        raise routes_rejected(error) from error


_DECODER = msgspec.json.Decoder(VllmAnswer)
