"""The CPU support package shares a pass out to plain requests as SGLang's loop does, and leaves all others to it."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("moe_trm_sglang_cpu", reason="CPU support is installed on machines without CUDA only")

from moe_trm_sglang_cpu.decoded import wrap
from moe_trm_sglang_cpu.masks import Rows, Shared, wrap_sharing

TOKENS, LOGPROBS = [7, 2, 9], [-0.5, -0.25, -1.5]


def request(**other: Any) -> Any:
    """A request with two tokens so far; `logprob.NAME` and `stats.NAME` are parts of it."""
    stats = {"enable_metrics": False, "last_decode_finish_time": 0.0}
    logprob = {
        "top_logprobs_num": 0,
        "token_ids_logprob": None,
        "output_token_logprobs_val": [-3.0, -4.0],
        "output_token_logprobs_idx": [5, 6],
    }
    params = {
        "ignore_eos": False,
        "stop_token_ids": {2},
        "stop_strs": [],
        "stop_regex_strs": [],
        "max_new_tokens": 8,
    }
    plain = {
        "output_ids": array("q", [5, 6]),
        "finished_reason": None,
        "to_finish": None,
        "grammar": None,
        "beam_group": None,
        "require_reasoning": False,
        "return_hidden_states": False,
        "return_logprob": True,
        "return_sampling_mask": True,
        "sampling_mask_rows": Rows(),
        "vocab_size": 100,
        "eos_token_ids": None,
        "tokenizer": None,
        "sampling_params": SimpleNamespace(**params),
        "kv": SimpleNamespace(mamba_ping_pong_track_buffer=None),
        "update_finish_state": lambda number: None,
    }
    plain |= {name: value for name, value in other.items() if "." not in name}
    logprob |= {name[8:]: value for name, value in other.items() if name.startswith("logprob.")}
    stats |= {name[6:]: value for name, value in other.items() if name.startswith("stats.")}
    tracing = SimpleNamespace(tracing_enable=stats.pop("tracing", False))
    req = SimpleNamespace(**plain, logprob=SimpleNamespace(**logprob))
    req.time_stats = SimpleNamespace(**stats, trace_ctx=tracing)
    return req


class Processor:
    """What SGLang's processor is asked, in the order of the questions."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.enable_overlap = self.enable_overlap_mlx = False
        self.decode_offload_manager = None
        self.model_config = SimpleNamespace(self_opened_think_start_ids=None)
        note = self.asked.append
        self.token_to_kv_pool_allocator = SimpleNamespace(
            free_group_begin=lambda: note("begin"), free_group_end=lambda: note("end")
        )
        self.output_streamer = SimpleNamespace(stream_output=lambda reqs, logprob: note(("stream", len(reqs), logprob)))
        self.metrics_reporter = SimpleNamespace(
            enable_metrics=False,
            num_generated_tokens=10,
            forward_ct_decode=4,
            report_decode_stats=lambda graph, running_batch, num_generated_tokens: note(("told", num_generated_tokens)),
        )

    materialize_sampling_mask_output = staticmethod(wrap_sharing(lambda reqs, output: None))

    def _handle_finish_state_updated_req(self, req: Any, batch: Any, result: Any, i: int, output: Any) -> None:
        self.asked.append(("handled", i, list(req.output_ids), list(req.logprob.output_token_logprobs_val)))


def the_pass(**other: Any) -> Any:
    """The result of a pass over three requests; `output.NAME` is a part of its output."""
    output = {
        "hidden_states": None,
        "customized_info": None,
        "next_token_top_logprobs_val": None,
        "next_token_token_ids_logprobs_val": None,
        "next_token_logprobs": torch.tensor(LOGPROBS),
        "next_token_sampling_mask_idx": None,
        "sampling_mask_output": Shared([b"a", b"b", b"c"]),
    }
    output |= {name[7:]: value for name, value in other.items() if name.startswith("output.")}
    plain = {
        "copy_done": None,
        "auxiliary_host_output": None,
        "indexer_topk_output": None,
        "routed_experts_output": None,
        "next_token_ids": torch.tensor(TOKENS),
        "can_run_cuda_graph": False,
        "get_num_generated_tokens": lambda size: size,
        "logits_output": SimpleNamespace(**output),
    }
    return SimpleNamespace(**(plain | {name: value for name, value in other.items() if "." not in name}))


def batch_of(reqs: list[Any], **other: Any) -> Any:
    plain = {
        "spec_algorithm": SimpleNamespace(is_none=lambda: True),
        "mamba_track_mask_cpu": None,
        "return_logprob": True,
    }
    return SimpleNamespace(reqs=reqs, **(plain | other))


def processed(processor: Any, batch: Any, result: Any) -> bool:
    """True if SGLang was asked."""
    native: list[Any] = []
    wrap(lambda *arguments: native.append(arguments))(processor, batch, result)
    if native:
        assert native == [(processor, batch, result)]
        assert not processor.asked
        assert all(list(req.output_ids) == [5, 6] for req in batch.reqs)
    return bool(native)


def test_every_request_gets_its_token_its_logprob_and_its_mask() -> None:
    done: list[str] = []
    reqs = [request(), request(), request(return_logprob=False)]
    reqs[1].update_finish_state = lambda number: done.append(f"updated {number} {list(reqs[1].output_ids)}")
    processor = Processor()
    result = the_pass(routed_experts_output=SimpleNamespace(finalize=lambda: done.append("routes")))
    for _ in range(2):
        assert not processed(processor, batch_of(reqs), result)
        result.logits_output.sampling_mask_output = Shared([b"d", b"e", b"f"])
    assert done == ["routes", "updated 1 [5, 6, 2]", "updated 1 [5, 6, 2, 2]"]
    assert result.routed_experts_output is None
    assert [list(req.output_ids) for req in reqs] == [[5, 6, token, token] for token in TOKENS]
    assert reqs[0].logprob.output_token_logprobs_val == [-3.0, -4.0, -0.5, -0.5]
    assert reqs[0].logprob.output_token_logprobs_idx == [5, 6, 7, 7]
    assert reqs[1].logprob.output_token_logprobs_val == [-3.0, -4.0, -0.25, -0.25]
    assert reqs[2].logprob.output_token_logprobs_val == [-3.0, -4.0]
    assert [req.sampling_mask_rows.parts for req in reqs] == [[b"a", b"d"], [b"b", b"e"], [b"c", b"f"]]
    assert all(req.time_stats.last_decode_finish_time > 0 for req in reqs)
    one = ["begin", ("handled", 1, [5, 6, 2], [-3.0, -4.0]), ("stream", 3, True), "end", ("told", 3)]
    two = ["begin", ("handled", 1, [5, 6, 2, 2], [-3.0, -4.0, -0.25]), ("stream", 3, True), "end", ("told", 3)]
    assert processor.asked == [*one, *two]
    assert (processor.metrics_reporter.num_generated_tokens, processor.metrics_reporter.forward_ct_decode) == (16, 6)


def test_a_pass_without_logprobs_and_masks_is_shared_out_too() -> None:
    reqs = [request(return_logprob=False, return_sampling_mask=False, sampling_mask_rows=None) for _ in TOKENS]
    result = the_pass(**{"output.sampling_mask_output": None, "output.next_token_logprobs": None})
    assert not processed(Processor(), batch_of(reqs, return_logprob=False), result)
    assert [req.output_ids[-1] for req in reqs] == TOKENS
    assert all(req.logprob.output_token_logprobs_val == [-3.0, -4.0] for req in reqs)


UNUSUAL_REQUESTS: list[dict[str, Any]] = [
    {"beam_group": object()},
    {"grammar": object()},
    {"require_reasoning": True},
    {"return_hidden_states": "last"},
    {"logprob.top_logprobs_num": 1},
    {"logprob.token_ids_logprob": [3]},
    {"kv": SimpleNamespace(mamba_ping_pong_track_buffer=[1])},
    {"sampling_mask_rows": object()},
    {"stats.enable_metrics": True},
    {"stats.tracing": True},
]
UNUSUAL_PASSES: list[dict[str, Any]] = [
    {"copy_done": object()},
    {"auxiliary_host_output": object()},
    {"indexer_topk_output": object()},
    {"next_token_ids": TOKENS},
    {"logits_output": None},
    {"output.hidden_states": object()},
    {"output.customized_info": {"a": [1]}},
    {"output.next_token_top_logprobs_val": [torch.zeros(1)]},
    {"output.next_token_token_ids_logprobs_val": [torch.zeros(1)]},
    {"output.sampling_mask_output": object()},
    {"output.sampling_mask_output": None},
]


@pytest.mark.parametrize("other", UNUSUAL_REQUESTS, ids=", ".join)
def test_a_batch_with_an_unusual_request_is_left_to_sglang(other: dict[str, Any]) -> None:
    assert processed(Processor(), batch_of([request(), request(**other), request()]), the_pass())


@pytest.mark.parametrize("other", UNUSUAL_PASSES, ids=", ".join)
def test_an_unusual_pass_is_left_to_sglang(other: dict[str, Any]) -> None:
    assert processed(Processor(), batch_of([request() for _ in TOKENS]), the_pass(**other))


@pytest.mark.parametrize(
    "other",
    [{"mamba_track_mask_cpu": [True]}, {"spec_algorithm": SimpleNamespace(is_none=lambda: False)}],
    ids=", ".join,
)
def test_an_unusual_batch_is_left_to_sglang(other: dict[str, Any]) -> None:
    assert processed(Processor(), batch_of([request() for _ in TOKENS], **other), the_pass())


@pytest.mark.parametrize("name", ["enable_overlap", "enable_overlap_mlx", "decode_offload_manager"])
def test_an_unusual_processor_does_everything_itself(name: str) -> None:
    processor = Processor()
    setattr(processor, name, True)
    assert processed(processor, batch_of([request() for _ in TOKENS]), the_pass())


def test_a_processor_that_measures_or_looks_for_thoughts_does_everything_itself() -> None:
    for part, name in (("metrics_reporter", "enable_metrics"), ("model_config", "self_opened_think_start_ids")):
        processor = Processor()
        setattr(getattr(processor, part), name, [1])
        assert processed(processor, batch_of([request() for _ in TOKENS]), the_pass())
