"""The form of an answer of SGLang's `/generate`: the fields that are read, and their types."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from moe_trm.errors import RecordRejected
from moe_trm.rollout.sglang.apart import EMPTY, without_routes

SHORT_BYTES = 1 << 15
"""An answer of so few is read in one piece: taking its routes apart takes longer than reading them as JSON."""

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
    """The routes as they are in the answer, of which they are by far the largest part.

    A copy would double the memory of a sample.
    """


class Answer(msgspec.Struct):
    """One element of `/generate`."""

    output_ids: list[Int32]
    meta_info: MetaInfo


_DECODER = msgspec.json.Decoder(Answer)


def decode_answer(body: bytes | memoryview) -> Answer:
    """The typed answer. Raises `RecordRejected` (`malformed`)."""
    parts = without_routes(body) if len(body) > SHORT_BYTES else None
    try:
        if parts is not None:
            answer = _DECODER.decode(parts[0])
            if bytes(answer.meta_info.routed_experts) == EMPTY:
                answer.meta_info.routed_experts = msgspec.Raw(parts[1])
                return answer
    except (msgspec.DecodeError, UnicodeDecodeError):
        pass  # The places that the error names are those of the whole answer, which is read below.
    try:
        return _DECODER.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RecordRejected(
            "malformed",
            "the engine's answer is not what was agreed",
            got=str(error),
            expected="the answer of SGLang 0.5.23's /generate",
        ) from error
