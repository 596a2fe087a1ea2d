"""Answers without a text, from the scheduler straight to the tokenizer manager, as the bytes that the client gets.

SGLang sends every finished request to a process that writes its tokens as text, and from there to the one with the
connection. Each unpacks all log-probs, masks and routes, and packs them again; the last one writes them as JSON. Of a
client that reads token ids alone, nobody reads the text. Here the scheduler writes the JSON, once, when the request has
ended. All that is unusual goes the way of SGLang.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any

import orjson
import pybase64

PREFIX = "moe-trm-ids-"
"""Beginning of the ids of requests whose answer is wanted without its text."""
PLAIN_ENDS = frozenset({"stop", "length"})


class Answers:
    """Finished requests on their way: their ids, and the JSON of each."""

    __slots__ = ("bodies", "rids")

    def __init__(self, rids: list[str], bodies: list[bytes]) -> None:
        self.rids, self.bodies = rids, bodies

    def __reduce__(self) -> tuple[type[Answers], tuple[list[str], list[bytes]]]:
        return Answers, (self.rids, self.bodies)


class Ways:
    """SGLang's way to the detokenizer, with the one past it.

    Args:
        long: SGLang's sender to the detokenizer.
        straight: its sender to the tokenizer manager.
    """

    def __init__(self, long: Any, straight: Any) -> None:
        self.socket, self.send_output = long.socket, long.send_output
        self.send_straight: Callable[[Answers], None] = straight.send_output


def add_way(native: Callable[[Any], None], scheduler: Any) -> None:
    """Around SGLang's `Scheduler.init_output_streamer`: its streamer knows both ways, unless it has more to do."""
    from sglang.srt.disaggregation.utils import DisaggregationMode
    from sglang.srt.runtime_context import get_observability

    native(scheduler)
    streamer, channels = scheduler.output_streamer, scheduler.ipc_channels
    more = (
        streamer.rust_server is not None
        or not streamer.spec_algorithm.is_none()
        or streamer.disaggregation_mode != DisaggregationMode.NULL
        or get_observability().enable_request_time_stats_logging
    )
    if not more:
        streamer.send_to_detokenizer = Ways(channels.send_to_detokenizer, channels.send_to_tokenizer)


def send_straight(streamer: Any, reqs: Sequence[Any], skip_req: Any = None) -> list[Any]:
    """Send what can go straight. The requests that SGLang has to send are returned.

    Of a request without a text nothing is sent before its end.
    """
    ways = streamer.send_to_detokenizer
    if not isinstance(ways, Ways):
        return [*reqs]
    others, ended = [], []
    for req in reqs:
        if not req.rid.startswith(PREFIX) or req is skip_req or req.stream:
            others.append(req)
        elif req.finished_reason is not None and not req.finished_output:
            (ended if is_plain(req) else others).append(req)
    if ended:
        ways.send_straight(Answers([req.rid for req in ended], _bodies(ended)))
    return others


def is_plain(req: Any) -> bool:
    """True for a finished request whose answer has nothing but what `answer` writes."""
    asked_more = (
        req.beam_group is not None
        or req.return_hidden_states
        or req.return_indexer_topk
        or req.customized_info is not None
        or req.multimodal_inputs is not None
    )
    logprob = req.logprob
    more_logprobs = req.return_logprob and (
        logprob.top_logprobs_num or logprob.token_ids_logprob is not None or logprob.input_token_logprobs_val
    )
    return not asked_more and not more_logprobs and req.finished_reason.to_json()["type"] in PLAIN_ENDS


def _bodies(reqs: Sequence[Any]) -> list[bytes]:
    from sglang.srt.runtime_context import get_serving
    from sglang.srt.utils.weight_versions import add_weight_versions_to_meta_info, compute_weight_version_spans

    version, bodies = get_serving().weight_version, []
    for req in reqs:
        req.finished_output = True
        if req.finished_len is None:
            req.finished_len = len(req.output_ids)
        spans = compute_weight_version_spans(
            req.weight_version_events, current_version=version, num_output_tokens=req.finished_len
        )
        versions: dict[str, Any] = {}
        add_weight_versions_to_meta_info(versions, spans, num_output_tokens=req.finished_len)
        bodies.append(answer(req, versions))
    return bodies


def answer(req: Any, versions: dict[str, Any]) -> bytes:
    """SGLang's JSON of a finished request, without its text and its times.

    Args:
        req: SGLang's request.
        versions: SGLang's fields about the weights.
    """
    output_ids = req.output_ids_through_stop.tolist()
    meta: dict[str, Any] = {
        "id": req.rid,
        "finish_reason": req.finished_reason.to_json(),
        "prompt_tokens": len(req.origin_input_ids),
        "num_retractions": req.retraction_count,
        "completion_tokens": len(output_ids),
        "cached_tokens": req.cached_tokens,
        **versions,
    }
    if req.return_logprob:
        logprob, number = req.logprob, len(output_ids)
        values, ids = logprob.output_token_logprobs_val[:number], logprob.output_token_logprobs_idx[:number]
        meta["output_token_logprobs"] = list(zip(values, ids, repeat(None)))
    if req.return_sampling_mask:
        ids_rows, logprob_rows = req.sampling_mask_rows.take().to_lists(req.sampling_logprobs_mode == "support")
        meta |= {"output_token_sampling_mask": ids_rows, "output_token_sampling_logprobs": logprob_rows}
    if req.return_routed_experts and req.routed_experts is not None:
        meta["routed_experts"] = pybase64.b64encode_as_string(req.routed_experts.numpy().data)
    return orjson.dumps({"output_ids": output_ids, "meta_info": meta}, option=orjson.OPT_SERIALIZE_NUMPY)


def register() -> None:
    """Let SGLang call `add_way`."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.init_output_streamer", add_way, HookType.AROUND)
