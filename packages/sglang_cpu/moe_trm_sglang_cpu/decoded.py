"""The tokens of a decoding pass, shared out to plain requests in one short loop.

After every pass SGLang asks a dozen functions per request what may be unusual about it: beams, grammars, reasoning,
drafts. Here a request is asked once whether anything can be, and then gets its token, its log-prob and its mask. What
ends a request, and what follows from that, is SGLang's own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from moe_trm_sglang_cpu.masks import Rows, Shared
from moe_trm_sglang_cpu.results import goes_on

PLAIN = "moe_trm_plain"
"""Attribute of a request with whether nothing about it is unusual."""


def wrap(native: Callable[[Any, Any, Any], None]) -> Callable[[Any, Any, Any], None]:
    """SGLang's `process_batch_result_decode`, which is `native`, for batches of plain requests."""

    def process(processor: Any, batch: Any, result: Any) -> None:
        if is_plain(processor, batch, result) and all(map(_is_plain, batch.reqs)):
            _share_out(processor, batch, result)
        else:
            native(processor, batch, result)

    return process


def is_plain(processor: Any, batch: Any, result: Any) -> bool:
    """True for a pass of one token for each request, with nothing but log-probs, masks and routes beside them."""
    output = result.logits_output
    return not (
        output is None
        or not isinstance(result.next_token_ids, Tensor)
        or processor.enable_overlap
        or processor.enable_overlap_mlx
        or processor.metrics_reporter.enable_metrics
        or processor.decode_offload_manager is not None
        or processor.model_config.self_opened_think_start_ids
        or result.copy_done is not None
        or result.auxiliary_host_output is not None
        or result.indexer_topk_output is not None
        or not batch.spec_algorithm.is_none()
        or batch.mamba_track_mask_cpu is not None
        or output.hidden_states is not None
        or output.customized_info is not None
        or output.next_token_top_logprobs_val
        or output.next_token_token_ids_logprobs_val
        or not (type(output.sampling_mask_output) is Shared or _without_masks(batch.reqs))
    )


def _without_masks(reqs: Any) -> bool:
    return not any(req.return_sampling_mask for req in reqs)


def _is_plain(req: Any) -> bool:
    found: bool | None = req.__dict__.get(PLAIN)
    if found is None:
        found = req.__dict__[PLAIN] = not (
            req.beam_group is not None
            or req.grammar is not None
            or req.require_reasoning
            or req.return_hidden_states
            or req.time_stats.enable_metrics
            or req.time_stats.trace_ctx.tracing_enable
            or req.logprob.top_logprobs_num
            or req.logprob.token_ids_logprob is not None
            or req.kv.mamba_ping_pong_track_buffer is not None
            or (req.return_sampling_mask and not isinstance(req.sampling_mask_rows, Rows))
        )
    return found


def _share_out(processor: Any, batch: Any, result: Any) -> None:
    reqs, output, reporter = batch.reqs, result.logits_output, processor.metrics_reporter
    if result.routed_experts_output is not None:
        result.routed_experts_output.finalize()
        result.routed_experts_output = None
    processor.materialize_sampling_mask_output(reqs, output)
    parts = output.next_token_sampling_mask_idx or [None] * len(reqs)
    tokens = result.next_token_ids.tolist()
    logprobs = output.next_token_logprobs.tolist() if batch.return_logprob else parts
    number = result.get_num_generated_tokens(len(reqs))
    reporter.num_generated_tokens += number
    allocator, now = processor.token_to_kv_pool_allocator, time.perf_counter()
    allocator.free_group_begin()
    for i, (req, token, logprob, part) in enumerate(zip(reqs, tokens, logprobs, parts, strict=True)):
        req.time_stats.last_decode_finish_time = now
        req.output_ids.append(token)
        if not goes_on(req):
            req.update_finish_state(1)
            processor._handle_finish_state_updated_req(req, batch, result, i, output)
        if req.return_logprob:
            req.logprob.output_token_logprobs_val.append(logprob)
            req.logprob.output_token_logprobs_idx.append(token)
        if req.return_sampling_mask:
            req.sampling_mask_rows.parts.append(part)
    processor.output_streamer.stream_output(reqs, batch.return_logprob)
    allocator.free_group_end()
    reporter.forward_ct_decode = (reporter.forward_ct_decode + 1) % (1 << 30)
    reporter.report_decode_stats(result.can_run_cuda_graph, running_batch=batch, num_generated_tokens=number)
