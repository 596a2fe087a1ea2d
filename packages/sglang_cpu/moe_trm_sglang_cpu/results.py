"""The end of a pass in SGLang's scheduler, without work for requests to which nothing happens.

After every token SGLang asks of every request whether it has ended, in a dozen ways, and whether something is to be
sent. Of a hundred requests that takes longer than the sampling. Here the usual answer, no, is found in a few looks. All
else is SGLang's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from moe_trm_sglang_cpu.answers import send_straight

ENDS = "moe_trm_ends"
"""Attribute of a request with the tokens that end it."""


def goes_on(req: Any) -> bool:
    """True for a request that its newest token certainly does not end. False says nothing."""
    if req.finished_reason is not None or req.to_finish or req.grammar is not None:
        return False
    ends = req.__dict__.get(ENDS)
    if ends is None:
        ends = req.__dict__[ENDS] = _ends(req)
    token, limit = req.output_ids[-1], req.vocab_size
    known = token >= 0 and (limit is None or token < limit)
    params = req.sampling_params
    texts = params.stop_strs or params.stop_regex_strs
    return known and not texts and token not in ends and len(req.output_ids) < params.max_new_tokens


def _ends(req: Any) -> frozenset[int]:
    params, tokenizer = req.sampling_params, req.tokenizer
    if params.ignore_eos:
        return frozenset()
    ends = {*(params.stop_token_ids or ()), *(req.eos_token_ids or ())}
    if tokenizer is not None:
        ends |= {tokenizer.eos_token_id, *(tokenizer.additional_stop_token_ids or ())}
    return frozenset(ends - {None})


def wrap_finish(native: Callable[..., None]) -> Callable[..., None]:
    """SGLang's `Req.update_finish_state`, which is `native`, for requests that may end."""

    def update_finish_state(req: Any, new_accepted_len: int = 1) -> None:
        if new_accepted_len != 1 or not goes_on(req):
            native(req, new_accepted_len)

    return update_finish_state


def wrap_handling(native: Callable[..., None]) -> Callable[..., None]:
    """SGLang's `_handle_finish_state_updated_req`, which is `native`, for requests of which there is more to do."""

    def handle(processor: Any, req: Any, batch: Any, result: Any, i: int, logits_output: Any) -> None:
        more = (
            req.finished_reason is not None
            or batch.mamba_track_mask_cpu is not None
            or req.kv.mamba_ping_pong_track_buffer is not None
            or processor.decode_offload_manager is not None
            or logits_output is None
            or logits_output.customized_info is not None
        )
        if more:
            native(processor, req, batch, result, i, logits_output)

    return handle


def wrap_sending(native: Callable[..., None], every: int) -> Callable[..., None]:
    """SGLang's `_stream_output_generation`, which is `native`, for requests of which something may be sent.

    `every`: tokens after which SGLang sends something of a request that does not stream.
    """

    def send(
        streamer: Any, reqs: Sequence[Any], return_logprob: bool, skip_req: Any = None, is_idle_batch: bool = False
    ) -> None:
        if is_idle_batch or streamer.has_additional_customized_info:
            native(streamer, reqs, return_logprob, skip_req, is_idle_batch)
            return
        heard = [
            req
            for req in reqs
            if req.finished_reason is not None
            or req.stream
            or req.beam_group is not None
            or len(req.output_ids) % every == 0
        ]
        if heard:
            heard = send_straight(streamer, heard, skip_req)
        if heard:
            native(streamer, heard, return_logprob, skip_req)

    return send
