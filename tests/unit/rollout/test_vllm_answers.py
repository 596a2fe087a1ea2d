"""Answers of vLLM become records; every broken answer is refused under its own reason."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from moe_trm.errors import EngineError, RecordRejected
from moe_trm.rollout.servers.http import EngineHttp
from moe_trm.rollout.servers.question import Question, RequestedFields
from moe_trm.rollout.servers.served_model import ServedModel
from moe_trm.rollout.vllm.given_tokens import greedy_tokens, scores_of
from moe_trm.rollout.vllm.parse import parse_turn
from moe_trm.rollout.vllm.request import LISTED_IDS, generate_request
from moe_trm.types import SampledTurn, SamplingParams

MODEL = ServedModel("Qwen3MoeForCausalLM", vocab_size=8, num_layers=2, moe_layer_ids=(0, 1), num_experts=4, top_k=2)
PARAMS = SamplingParams(top_k=3, max_new_tokens=2)
QUESTION = Question((5, 6, 7), PARAMS, RequestedFields(routes=True, mask=True))
ROUTES = np.array([[[0, 1], [2, 3]], [[1, 2], [3, 0]], [[3, 1], [0, 2]], [[2, 0], [1, 3]]], np.uint8)


def payload(routes: np.ndarray) -> str:
    file = io.BytesIO()
    np.save(file, routes)
    return base64.b64encode(file.getvalue()).decode()


def listed(token: int, **likely: float) -> dict[str, Any]:
    """The log-probs of one position; ids of `likely` are `id3`."""
    top = [{"token": f"token_id:{name[2:]}", "logprob": value, "bytes": [1]} for name, value in likely.items()]
    return {"token": f"token_id:{token}", "logprob": likely[f"id{token}"], "bytes": [1], "top_logprobs": top}


def good() -> dict[str, Any]:
    """Two sampled tokens: 3 with probability 0.5 of two kept ids, 1 with certainty."""
    half = math.log(0.5)
    content = [listed(3, id3=half, id2=half, id7=-9999.0), listed(1, id1=0.0, id0=-9999.0, id2=-9999.0)]
    choice = {
        "index": 0,
        "token_ids": [3, 1],
        "finish_reason": "stop",
        "logprobs": {"content": content},
        "routed_experts": payload(ROUTES),
        "sampling_mask": None,
    }
    return {"weight_version": "4", "prompt_token_ids": [5, 6, 7], "usage": {"prompt_tokens": 3}, "choices": [choice]}


def parse(answer: object, question: Question = QUESTION) -> SampledTurn:
    return parse_turn(json.dumps(answer).encode(), question, MODEL)


def test_a_good_answer_becomes_a_turn() -> None:
    turn = parse(good())
    assert turn.tokens.tolist() == [3, 1]
    assert turn.versions.tolist() == [4, 4]
    assert turn.rollout_logprobs.tolist() == pytest.approx([math.log(0.5), 0.0])
    assert np.isnan(turn.full_logprobs).all()
    assert turn.routes is not None
    assert (turn.routes.experts == ROUTES).all()
    mask = turn.sampling_mask
    assert mask is not None
    assert (mask.ids.tolist(), mask.offsets.tolist()) == ([2, 3, 1], [0, 2, 3])
    assert turn.finish_reason == "stop"


def test_log_probs_of_an_untruncated_answer_are_those_of_the_vocabulary() -> None:
    requested = RequestedFields(routes=False, mask=False)
    turn = parse(good(), replace(QUESTION, params=replace(PARAMS, top_k=8), requested=requested))
    assert turn.full_logprobs.tolist() == turn.rollout_logprobs.tolist()
    assert turn.routes is None
    assert turn.sampling_mask is None


def test_an_engine_that_names_the_kept_ids_is_believed() -> None:
    answer = good()
    answer["choices"][0]["sampling_mask"] = [[2, 3], [0, 1]]
    mask = parse(answer, replace(QUESTION, params=replace(PARAMS, top_k=LISTED_IDS + 1))).sampling_mask
    assert mask is not None
    assert (mask.ids.tolist(), mask.logprobs) == ([2, 3, 0, 1], None)


def test_rows_of_earlier_turns_are_left_out() -> None:
    answer = good()
    answer["choices"][0]["routed_experts"] = payload(ROUTES[2:])
    turn = parse(answer, replace(QUESTION, start=2))
    assert turn.routes is not None
    assert (turn.routes.experts == ROUTES[2:]).all()


def test_an_aborted_answer_is_the_beginning_of_one_where_that_was_asked_for() -> None:
    answer = good()
    answer["choices"][0]["finish_reason"] = "abort"
    partial = replace(QUESTION, requested=replace(QUESTION.requested, partial=True))
    assert parse(answer, partial).finish_reason == "abort"
    with pytest.raises(RecordRejected) as caught:
        parse(answer)
    assert caught.value.reason == "aborted"


def choice(change: Callable[[dict[str, Any]], object]) -> Callable[[dict[str, Any]], object]:
    return lambda answer: change(answer["choices"][0])


BROKEN: dict[str, tuple[str, Callable[[dict[str, Any]], object]]] = {
    "no label": ("malformed", lambda answer: answer.pop("weight_version")),
    "no push": ("version_unknown", lambda answer: answer.update(weight_version="none")),
    "a version beyond int32": ("version_unknown", lambda answer: answer.update(weight_version="9" * 10)),
    "two choices": ("malformed", lambda answer: answer["choices"].append(answer["choices"][0])),
    "unknown end": ("malformed", choice(lambda it: it.update(finish_reason="error"))),
    "a longer prompt": ("prompt_length", lambda answer: answer["usage"].update(prompt_tokens=4)),
    "another prompt": ("other_prompt", lambda answer: answer.update(prompt_token_ids=[5, 4, 7])),
    "no prompt": ("malformed", lambda answer: answer.pop("prompt_token_ids")),
    "no token": ("empty_output", choice(lambda it: it.update(token_ids=[]))),
    "id of no token": ("token_range", choice(lambda it: it.update(token_ids=[3, 8]))),
    "the context was full": ("clipped", choice(lambda it: it.update(cut(it)))),
    "a log-prob too few": ("logprob_count", choice(lambda it: it["logprobs"]["content"].pop())),
    "no log-probs": ("logprob_count", choice(lambda it: it.update(logprobs=None))),
    "of another token": ("logprob_ids", choice(lambda it: it["logprobs"]["content"][0].update(token="token_id:2"))),
    "missing": ("logprob_value", choice(lambda it: it["logprobs"]["content"][0].update(logprob=-9999.0))),
    "positive": ("logprob_value", choice(lambda it: it["logprobs"]["content"][0].update(logprob=0.1))),
    "raw log-probs": ("mask_sum", choice(lambda it: it["logprobs"]["content"][0]["top_logprobs"].pop(1))),
    "an id that is none": (
        "malformed",
        choice(lambda it: it["logprobs"]["content"][0]["top_logprobs"][0].update(token="a")),
    ),
    "an id twice": (
        "mask_duplicate",
        choice(lambda it: it["logprobs"]["content"][0]["top_logprobs"][1].update(token="token_id:3")),
    ),
    "sampled outside of its mask": (
        "mask_violation",
        choice(lambda it: it["logprobs"]["content"][0]["top_logprobs"][0].update(token="token_id:6")),
    ),
    "no routes": ("route_payload", choice(lambda it: it.update(routed_experts=None))),
    "a row too few": ("route_rows", choice(lambda it: it.update(routed_experts=payload(ROUTES[1:])))),
    "an expert that is none": ("route_range", choice(lambda it: it.update(routed_experts=payload(ROUTES + 2)))),
    "rows that were never filled": (
        "route_duplicate",
        choice(lambda it: it.update(routed_experts=payload(0 * ROUTES))),
    ),
}


def cut(it: dict[str, Any]) -> dict[str, Any]:
    """The choice after its first token."""
    shorter = {"content": it["logprobs"]["content"][:1]}
    return {"finish_reason": "length", "token_ids": it["token_ids"][:1], "logprobs": shorter}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_answer_is_refused(name: str) -> None:
    reason, broken = BROKEN[name]
    answer = good()
    broken(answer)
    with pytest.raises(RecordRejected) as caught:
        parse(answer)
    assert caught.value.reason == reason


def test_weights_that_another_run_gave_are_not_believed() -> None:
    requested = replace(QUESTION, requested=RequestedFields(routes=True, mask=True, run="cafe"))
    assert set(parse(good() | {"weight_version": "4-cafe"}, requested).versions) == {4}
    with pytest.raises(RecordRejected) as caught:
        parse(good() | {"weight_version": "4-ab"}, requested)
    assert caught.value.reason == "version_unknown"


def test_bytes_that_are_no_answer_are_refused() -> None:
    for body in (b"", b"{", b"[]", b"\xff", json.dumps(good()).encode()[:-9]):
        with pytest.raises(RecordRejected) as caught:
            parse_turn(body, QUESTION, MODEL)
        assert caught.value.reason == "malformed"


def test_a_mask_that_nobody_can_tell_is_missing() -> None:
    with pytest.raises(RecordRejected) as caught:
        parse(good(), replace(QUESTION, params=replace(PARAMS, top_k=LISTED_IDS + 1)))
    assert caught.value.reason == "mask_missing"


def test_a_request_asks_for_no_stream_and_no_name_and_as_many_ids_as_may_be_kept() -> None:
    asked = generate_request(QUESTION)
    assert asked.keys() == {"token_ids", "sampling_params"}
    sampling = asked["sampling_params"]
    assert isinstance(sampling, dict)
    assert (sampling["logprobs"], sampling["ignore_eos"], sampling["max_tokens"]) == (3, True, 2)
    assert not {"seed", "stop", "routed_experts_prompt_start"} & sampling.keys()
    bare = generate_request(replace(QUESTION, requested=RequestedFields(routes=False, mask=False)))
    assert bare["sampling_params"] == sampling | {"logprobs": 0}


def test_rows_and_seeds_and_texts_are_asked_for() -> None:
    params = replace(PARAMS, seed=7, stop_texts=("end",))
    sampling = generate_request(replace(QUESTION, start=2, params=params))["sampling_params"]
    assert isinstance(sampling, dict)
    assert sampling["routed_experts_prompt_start"] == 2
    assert (sampling["seed"], sampling["stop"], sampling["detokenize"]) == (7, ["end"], True)


class Scoring:
    """A server that scores: the answer to whatever is asked, and what was asked."""

    url = "http://127.0.0.1:9"

    def __init__(self, answer: object) -> None:
        self._answer = answer
        self.asked: dict[str, Any] = {}

    async def post(self, path: str, body: dict[str, Any]) -> object:
        assert path == "/inference/v1/generate"
        self.asked = body
        return self._answer


def scoring(answer: object) -> tuple[EngineHttp, Scoring]:
    server = Scoring(answer)
    return cast(EngineHttp, server), server


def test_tokens_are_decoded_greedily_with_log_probs_at_temperature_1() -> None:
    http, server = scoring(good())
    tokens, logprobs = asyncio.run(greedy_tokens(http, (5, 6, 7), 2))
    assert tokens.tolist() == [3, 1]
    assert logprobs.tolist() == pytest.approx([math.log(0.5), 0.0])
    sampling = server.asked["sampling_params"]
    assert (sampling["temperature"], sampling["max_tokens"], sampling["ignore_eos"]) == (0.0, 2, True)
    with pytest.raises(EngineError, match="ended early"):
        asyncio.run(greedy_tokens(http, (5, 6, 7), 3))


def test_given_tokens_are_scored_by_their_prefill() -> None:
    told = [None, {"6": {"logprob": -1.5}}, {"7": {"logprob": -9999.0}}]
    http, server = scoring({"prompt_logprobs": told})
    found = asyncio.run(scores_of(http, (5, 6, 7)))
    assert found[0] == -1.5
    assert np.isnan(found[1])  # an id without a probability is no number, so the proof fails
    assert server.asked["sampling_params"]["prompt_logprobs"] == 0
    for wrong in (None, told[:2], [*told, told[1]], [None, told[1], {"2": {"logprob": -1.0}}]):
        with pytest.raises(EngineError, match="not of the tokens"):
            asyncio.run(scores_of(scoring({"prompt_logprobs": wrong})[0], (5, 6, 7)))
