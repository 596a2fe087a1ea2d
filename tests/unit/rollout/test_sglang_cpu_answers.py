"""The CPU support package sends answers without a text past the detokenizer: what SGLang would say of them, no more."""

from __future__ import annotations

import pickle
from array import array
from base64 import b64decode
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
import torch

pytest.importorskip("moe_trm_sglang_cpu", reason="CPU support is installed on machines without CUDA only")

from moe_trm_sglang_cpu import answers
from moe_trm_sglang_cpu.answers import PREFIX, Ways, answer, is_plain, send_straight
from moe_trm_sglang_cpu.masks import Rows, pairs_of
from moe_trm_sglang_cpu.results import wrap_sending

VERSIONS = {"weight_versions": [{"version": "3", "start": 0, "end": 2}], "weight_version": "3"}
ROUTES = torch.arange(12, dtype=torch.int32).view(3, 2, 2)


def reason(kind: str) -> Any:
    return SimpleNamespace(to_json=lambda: {"type": kind, "matched": 2})


def rows() -> Rows:
    found = Rows()
    ids, logprobs = torch.tensor([[7, 9], [9, 2]], dtype=torch.int32), torch.tensor([[-0.5, -1.0], [-0.25, -2.0]])
    found.parts += [
        pairs_of(ids[0].numpy(), logprobs[0].numpy()),
        pairs_of(ids[1, :1].numpy(), logprobs[1, :1].numpy()),
    ]
    return found


def request(**other: Any) -> Any:
    """A finished request with everything that is recorded, but for `other`; `logprob.NAME` is one of its log-probs."""
    logprob = {
        "top_logprobs_num": 0,
        "token_ids_logprob": None,
        "input_token_logprobs_val": [],
        "output_token_logprobs_val": [-0.5, -0.25, -9.0],
        "output_token_logprobs_idx": [7, 9, 5],
    }
    plain = {
        "rid": PREFIX + "a",
        "stream": False,
        "finished_reason": reason("stop"),
        "finished_output": None,
        "finished_len": 2,
        "output_ids": array("q", [7, 9, 5]),
        "output_ids_through_stop": array("q", [7, 9]),
        "origin_input_ids": array("q", [1, 2]),
        "retraction_count": 1,
        "cached_tokens": 4,
        "beam_group": None,
        "return_logprob": True,
        "return_hidden_states": False,
        "return_indexer_topk": False,
        "return_sampling_mask": True,
        "sampling_logprobs_mode": "support",
        "sampling_mask_rows": rows(),
        "return_routed_experts": True,
        "routed_experts": ROUTES,
        "customized_info": None,
        "multimodal_inputs": None,
    }
    own = {name: value for name, value in other.items() if not name.startswith("logprob.")}
    logprob |= {name.removeprefix("logprob."): other[name] for name in other.keys() - own.keys()}
    return SimpleNamespace(**(plain | own), logprob=SimpleNamespace(**logprob))


UNUSUAL: list[dict[str, Any]] = [
    {"finished_reason": reason("abort")},
    {"beam_group": object()},
    {"return_hidden_states": "last"},
    {"return_indexer_topk": True},
    {"customized_info": {"a": [1]}},
    {"multimodal_inputs": object()},
    {"logprob.top_logprobs_num": 1},
    {"logprob.token_ids_logprob": [3]},
    {"logprob.input_token_logprobs_val": [-1.0]},
]


def sender(sent: list[Any]) -> Any:
    return SimpleNamespace(socket=None, send_output=sent.append)


def streamer(sent: list[Any]) -> Any:
    ways = Ways(sender([]), sender(sent))
    return SimpleNamespace(send_to_detokenizer=ways, has_additional_customized_info=False)


@pytest.fixture(autouse=True)
def of_one_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers of the weights of `VERSIONS`, without SGLang."""

    def bodies(reqs: list[Any]) -> list[bytes]:
        for req in reqs:
            req.finished_output = True
        return [answer(req, VERSIONS) for req in reqs]

    monkeypatch.setattr(answers, "_bodies", bodies)


def test_an_answer_has_every_record_in_the_form_of_sglang() -> None:
    body = orjson.loads(answer(request(), VERSIONS))
    meta = body["meta_info"]
    routes = torch.frombuffer(bytearray(b64decode(meta.pop("routed_experts"))), dtype=torch.int32)
    assert torch.equal(routes.view(ROUTES.shape), ROUTES)
    assert body["output_ids"] == [7, 9]
    assert meta == {
        "id": PREFIX + "a",
        "finish_reason": {"type": "stop", "matched": 2},
        "prompt_tokens": 2,
        "num_retractions": 1,
        "completion_tokens": 2,
        "cached_tokens": 4,
        "output_token_logprobs": [[-0.5, 7, None], [-0.25, 9, None]],
        "output_token_sampling_mask": [[7, 9], [9]],
        "output_token_sampling_logprobs": [[-0.5, -1.0], [-0.25]],
        **VERSIONS,
    }


def test_an_answer_has_no_record_that_was_not_asked_for() -> None:
    bare = request(return_logprob=False, return_sampling_mask=False, return_routed_experts=False)
    meta = orjson.loads(answer(bare, VERSIONS))["meta_info"]
    assert not {"output_token_logprobs", "output_token_sampling_mask", "routed_experts"} & meta.keys()


def test_a_number_that_is_none_is_null() -> None:
    found = request(**{"logprob.output_token_logprobs_val": [float("nan"), -1.0]})
    assert orjson.loads(answer(found, VERSIONS))["meta_info"]["output_token_logprobs"] == [
        [None, 7, None],
        [-1.0, 9, None],
    ]


@pytest.mark.parametrize("other", UNUSUAL, ids=", ".join)
def test_an_unusual_request_is_sent_by_sglang(other: dict[str, Any]) -> None:
    sent: list[Any] = []
    req = request(**other)
    assert is_plain(request())
    assert send_straight(streamer(sent), [req]) == [req]
    assert not sent


def test_finished_requests_for_ids_go_straight_and_the_others_do_not() -> None:
    sent: list[Any] = []
    ended = [request(rid=f"{PREFIX}{number}") for number in range(2)]
    others = [request(rid="another"), request(stream=True), request(finished_reason=None, rid="another")]
    running, skipped = request(finished_reason=None), request()
    reqs = [others[0], ended[0], running, *others[1:], ended[1], skipped]
    assert send_straight(streamer(sent), reqs, skipped) == [*others, skipped]
    [found] = sent
    assert found.rids == [PREFIX + "0", PREFIX + "1"]
    assert [orjson.loads(body)["meta_info"]["id"] for body in found.bodies] == found.rids
    again = pickle.loads(pickle.dumps(found))
    assert (again.rids, again.bodies) == (found.rids, found.bodies)
    assert send_straight(streamer(sent), ended) == []
    assert len(sent) == 1, "an answer that was sent twice"


def test_a_streamer_with_one_way_sends_everything_itself() -> None:
    req = request()
    assert send_straight(SimpleNamespace(send_to_detokenizer=sender([])), [req]) == [req]


def test_what_goes_straight_is_not_sent_by_sglang_too() -> None:
    asked: list[Any] = []
    sent: list[Any] = []
    send = wrap_sending(lambda *arguments: asked.append(arguments[1]), every=2)
    ended, other = request(), request(rid="another")
    running = request(finished_reason=None, output_ids=array("q", [7, 9]))
    send(streamer(sent), [ended, running], True)
    assert not asked
    send(streamer(sent), [request(), other], True)
    assert asked == [[other]]
    assert [found.rids for found in sent] == [[PREFIX + "a"]] * 2
