"""Answers of the engine become records; every broken answer is refused under its own reason."""

from __future__ import annotations

import base64
import copy
import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_trm.errors import RecordRejected
from moe_trm.rollout.servers.question import RequestedFields
from moe_trm.rollout.servers.served_model import ServedModel
from moe_trm.rollout.sglang.checks import parse_answer
from moe_trm.types import Prompt, RolloutRecord

MODEL = ServedModel("Qwen3MoeForCausalLM", vocab_size=8, num_layers=2, moe_layer_ids=(0, 1), num_experts=4, top_k=2)
PROMPT = Prompt("p", (5, 6, 7))
EVERYTHING = RequestedFields(routes=True, mask=True)
ROUTES = np.array([[[0, 1], [2, 3]], [[1, 2], [3, 0]], [[3, 1], [0, 2]], [[2, 0], [1, 3]]], "<i4")


def payload(routes: np.ndarray) -> str:
    return base64.b64encode(routes.astype("<i4").tobytes()).decode()


def good() -> dict[str, Any]:
    """Two sampled tokens: 3 with probability 0.5 of a kept half, 1 with certainty."""
    return {
        "text": "ignored",
        "output_ids": [3, 1],
        "prompt_token_ids": [5, 6, 7],
        "meta_info": {
            "id": "ignored",
            "finish_reason": {"type": "stop", "matched": 1},
            "prompt_tokens": 3,
            "num_retractions": 0,
            "weight_version": "4",
            "weight_versions": [{"version": "4", "start": 0, "end": 2}],
            "output_token_logprobs": [[math.log(0.25), 3, None], [math.log(0.9), 1, None]],
            "output_token_sampling_mask": [[2, 3], [1]],
            "output_token_sampling_logprobs": [[math.log(0.5), math.log(0.5)], [0.0]],
            "output_token_sampling_mask_length": 2,
            "routed_experts": payload(ROUTES),
        },
    }


def parse(answer: object, requested: RequestedFields = EVERYTHING) -> RolloutRecord:
    return parse_answer(json.dumps(answer).encode(), PROMPT, MODEL, requested, sample_id=17, group_id=2)


def test_a_good_answer_becomes_a_record() -> None:
    record = parse(good())
    assert record.tokens.tolist() == [5, 6, 7, 3, 1]
    assert record.tokens.dtype == np.int32
    assert record.sampled.tolist() == [False, False, False, True, True]
    assert record.turn_ids.tolist() == [0] * 5
    assert record.versions.tolist() == [4, 4]
    assert (record.sample_id, record.group_id, record.prompt_id, record.finish_reason) == (17, 2, "p", "stop")
    np.testing.assert_allclose(record.rollout_logprobs, [math.log(0.5), 0.0], rtol=1e-6)
    np.testing.assert_allclose(record.full_logprobs, [math.log(0.25), math.log(0.9)], rtol=1e-6)
    assert record.sampling_mask is not None
    assert record.sampling_mask.offsets.tolist() == [0, 2, 3]
    assert record.sampling_mask.ids.tolist() == [2, 3, 1], "ascending within each row"
    assert record.routes is not None
    assert np.array_equal(record.routes.experts, ROUTES)
    record.routes.check_tokens(record.tokens, record.origin)


def test_without_a_mask_the_policy_is_scored_over_the_vocabulary() -> None:
    record = parse(good(), RequestedFields(routes=False, mask=False))
    assert record.sampling_mask is None
    assert record.routes is None
    assert np.array_equal(record.rollout_logprobs, record.full_logprobs)


def test_routes_of_before_a_weight_change_can_be_left_out() -> None:
    answer = good()
    answer["meta_info"]["weight_versions"] = SPANS
    record = parse(answer, RequestedFields(routes=True, mask=False, missing="native"))
    assert record.versions.tolist() == [4, 5]
    assert record.routes is not None
    assert record.routes.coverage().tolist() == [False, False, False, True]
    assert np.array_equal(record.routes.experts[3], ROUTES[3])


@pytest.mark.parametrize("versions", [1, 2])
def test_of_a_retracted_answer_only_the_last_row_is_known(versions: int) -> None:
    """The engine computed all rows before the retraction again; it does not say where that was."""
    answer = good()
    answer["output_ids"] = [3, 1, 1]
    spans = [("4", 0, 1), ("5", 1, 3)] if versions == 2 else [("4", 0, 3)]
    answer["meta_info"] |= {
        "num_retractions": 1,
        "weight_versions": [{"version": v, "start": start, "end": end} for v, start, end in spans],
        "output_token_logprobs": [[math.log(0.25), 3, None], *[[math.log(0.9), 1, None]] * 2],
        "routed_experts": payload(np.concatenate([ROUTES, ROUTES[:1]])),
    }
    record = parse(answer, RequestedFields(routes=True, mask=False, missing="native"))
    assert record.routes is not None
    assert record.routes.coverage().tolist() == [False, False, False, False, True]
    assert np.array_equal(record.routes.experts[4], ROUTES[0])
    assert np.isfinite(record.full_logprobs).all()


def test_a_retraction_does_not_matter_without_routes_or_before_the_only_token() -> None:
    answer = good()
    answer["meta_info"]["num_retractions"] = 1
    assert parse(answer, RequestedFields(routes=False, mask=True)).num_sampled == 2
    del answer["meta_info"]["num_retractions"]
    assert parse(answer, RequestedFields(routes=False, mask=True)).num_sampled == 2
    one = good()
    one["output_ids"] = [3]
    one["meta_info"] |= {
        "num_retractions": 1,
        "weight_versions": [{"version": "4", "start": 0, "end": 1}],
        "output_token_logprobs": [[math.log(0.25), 3, None]],
        "routed_experts": payload(ROUTES[:3]),
    }
    record = parse(one, RequestedFields(routes=True, mask=False))
    assert record.routes is not None
    assert record.routes.coverage().all()


def set_meta(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda answer: answer["meta_info"].update(fields)


def set_ids(ids: list[Any]) -> Callable[[dict[str, Any]], None]:
    def change(answer: dict[str, Any]) -> None:
        answer["output_ids"] = ids

    return change


SPANS = [{"version": "4", "start": 0, "end": 1}, {"version": "5", "start": 1, "end": 2}]
OUT_OF_RANGE, DUPLICATE = ROUTES.copy(), ROUTES.copy()
OUT_OF_RANGE[1, 0, 1], DUPLICATE[2, 1] = 4, [1, 1]
HALF = math.log(0.5)

BROKEN: list[tuple[str, Callable[[dict[str, Any]], None]]] = [
    ("malformed", lambda answer: answer.pop("output_ids")),
    ("malformed", lambda answer: answer.pop("meta_info")),
    ("malformed", set_ids([3, "1"])),
    ("malformed", set_ids([3, 2**40])),
    ("malformed", set_meta(finish_reason=None)),
    ("malformed", set_meta(finish_reason={"type": "surprise"})),
    ("aborted", set_meta(finish_reason={"type": "abort", "message": "no memory"})),
    ("empty_output", set_ids([])),
    ("prompt_length", set_meta(prompt_tokens=4)),
    ("prompt_length", lambda answer: answer.update(prompt_token_ids=[5, 6])),
    ("other_prompt", lambda answer: answer.update(prompt_token_ids=[5, 4, 7])),
    ("other_prompt", lambda answer: answer.pop("prompt_token_ids")),
    ("token_range", set_ids([8, 1])),
    ("token_range", set_ids([-1, 1])),
    ("logprob_count", set_meta(output_token_logprobs=[[-1.0, 3, None]])),
    ("logprob_count", set_meta(output_token_logprobs=None)),
    ("logprob_ids", set_meta(output_token_logprobs=[[-1.0, 3, None], [-0.1, 2, None]])),
    ("logprob_value", set_meta(output_token_logprobs=[[None, 3, None], [-0.1, 1, None]])),
    ("logprob_value", set_meta(output_token_logprobs=[[0.1, 3, None], [-0.1, 1, None]])),
    ("logprob_value", set_meta(output_token_logprobs=[[-1e300, 3, None], [-0.1, 1, None]])),
    ("version_missing", set_meta(weight_versions=None)),
    ("version_missing", set_meta(weight_versions=[])),
    ("version_missing", set_meta(weight_versions=[{"version": "4", "start": 0, "end": 1}])),
    ("version_missing", set_meta(weight_versions=[{"version": "4", "start": 1, "end": 2}])),
    ("version_missing", set_meta(weight_versions=[SPANS[0], {"version": "5", "start": 0, "end": 2}])),
    ("version_span", set_meta(weight_versions=SPANS)),
    ("version_span", set_meta(weight_versions=SPANS, num_retractions=1)),
    ("retracted", set_meta(num_retractions=1)),
    ("retracted", set_meta(num_retractions=3)),
    ("retraction_unknown", set_meta(num_retractions=None)),
    ("malformed", set_meta(num_retractions=-1)),
    ("malformed", set_meta(num_retractions=0.5)),
    ("route_dtype", set_meta(routed_experts_dtype="int64")),
    ("route_dtype", set_meta(routed_experts_dtype="float32")),
    ("route_rows", set_meta(routed_experts_dtype="uint8")),
    ("route_rows", set_meta(routed_experts_dtype="uint16")),
    ("malformed", set_meta(routed_experts_dtype=8)),
    ("version_unknown", set_meta(weight_versions=[{"version": "default", "start": 0, "end": 2}])),
    ("version_unknown", set_meta(weight_versions=[{"version": "9" * 12, "start": 0, "end": 2}])),
    ("mask_missing", set_meta(output_token_sampling_mask=None)),
    ("mask_missing", set_meta(output_token_sampling_logprobs=None)),
    ("mask_shape", set_meta(output_token_sampling_mask=[[2, 3]], output_token_sampling_logprobs=[[HALF, HALF]])),
    ("mask_shape", set_meta(output_token_sampling_logprobs=[[HALF], [0.0]])),
    (
        "mask_empty",
        set_meta(output_token_sampling_mask=[[2, 3], []], output_token_sampling_logprobs=[[HALF, HALF], []]),
    ),
    ("mask_range", set_meta(output_token_sampling_mask=[[3, 8], [1]])),
    ("mask_duplicate", set_meta(output_token_sampling_mask=[[3, 3], [1]])),
    ("mask_violation", set_meta(output_token_sampling_mask=[[2, 4], [1]])),
    ("mask_logprob", set_meta(output_token_sampling_logprobs=[[HALF, None], [0.0]])),
    ("mask_sum", set_meta(output_token_sampling_logprobs=[[HALF, HALF], [-0.5]])),
    ("route_missing", set_meta(routed_experts=None)),
    ("route_payload", set_meta(routed_experts=payload(ROUTES)[:-8])),
    ("route_payload", set_meta(routed_experts="not base64!")),
    ("route_rows", set_meta(routed_experts=payload(ROUTES[:-1]))),
    ("route_rows", set_meta(routed_experts=payload(np.concatenate([ROUTES, ROUTES[:1]])))),
    ("route_range", set_meta(routed_experts=payload(OUT_OF_RANGE))),
    ("route_duplicate", set_meta(routed_experts=payload(DUPLICATE))),
]


@pytest.mark.parametrize(("reason", "break_it"), BROKEN)
def test_each_violation_has_its_reason(reason: str, break_it: Callable[[dict[str, Any]], object]) -> None:
    answer = good()
    break_it(answer)
    with pytest.raises(RecordRejected) as caught:
        parse(answer)
    assert caught.value.reason == reason
    assert "sample 17" in str(caught.value)


@pytest.mark.parametrize("sampled", [[], [3]])
def test_an_answer_that_was_aborted_in_the_queue_is_no_malformed_one(sampled: list[int]) -> None:
    """SGLang leaves out the count of prompt tokens there, and with the routes the tokens from before a retraction."""
    meta = {"id": "x", "finish_reason": {"type": "abort", "message": "Abort in waiting queue"}, "weight_version": "4"}
    answer = {"text": "", "output_ids": sampled, "meta_info": {**meta, "e2e_latency": 0.1, "completion_tokens": 0}}
    for partial in (False, True):
        with pytest.raises(RecordRejected) as rejection:
            parse(answer, replace(EVERYTHING, partial=partial))
        assert rejection.value.reason == "aborted"


@pytest.mark.parametrize("body", [b"", b"null", b"{", b'{"output_ids": [NaN]}', b"\xff"])
def test_what_is_not_json_is_refused(body: bytes) -> None:
    with pytest.raises(RecordRejected, match="not what was agreed"):
        parse_answer(body, PROMPT, MODEL, EVERYTHING, sample_id=0, group_id=0)


def test_where_nothing_but_tokens_is_recorded_a_router_may_drop_the_prompt() -> None:
    answer = good()
    del answer["prompt_token_ids"]
    assert parse(answer, RequestedFields(routes=False, mask=False)).num_sampled == 2
    with pytest.raises(RecordRejected, match="another prompt"):
        parse(answer | {"prompt_token_ids": [5, 6, 8]}, RequestedFields(routes=False, mask=False))


def test_a_row_that_spans_versions_is_kept_when_routes_do_not_matter() -> None:
    answer = good()
    answer["meta_info"]["weight_versions"] = SPANS
    assert parse(answer, RequestedFields(routes=False, mask=True)).versions.tolist() == [4, 5]


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=3),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=3), children, max_size=2),
    max_leaves=4,
)


@pytest.mark.parametrize("label", ["4", "4-beef", "4-cafe0", "4-", "-cafe", "4-CAFE", "4-cafe\n", "\u0664-cafe"])
def test_weights_that_another_run_gave_are_not_believed(label: str) -> None:
    """Under the same number too; once a run has pushed, every answer names it."""
    requested = RequestedFields(routes=True, mask=False, run="cafe")
    for spans, good_until in (([label], 0), (["4-cafe", label], 1)):
        answer = good()
        answer["meta_info"]["weight_versions"] = [
            {"version": each, "start": place, "end": place + 1} for place, each in enumerate((*spans, "4-cafe")[:2])
        ]
        with pytest.raises(RecordRejected, match="no push of this run") as caught:
            parse(answer, requested)
        assert caught.value.reason == "version_unknown"
        answer["meta_info"]["weight_versions"][good_until]["version"] = "4-cafe"
        assert parse(answer, requested).versions.tolist() == [4, 4]
        # Before a run's first push, as where a server is only looked at, every push is one.
        assert parse(answer, RequestedFields(routes=True, mask=False)).versions.tolist() == [4, 4]


READ = ["finish_reason", "prompt_tokens", "output_token_logprobs", "weight_versions", "output_token_sampling_mask"]
READ += ["output_token_sampling_logprobs", "routed_experts", "num_retractions"]


@settings(max_examples=300)
@given(field=st.sampled_from(["output_ids", *READ]), value=JSON_VALUES, index=st.integers(0, 3))
def test_no_mutation_gets_through_or_crashes(field: str, value: Any, index: int) -> None:
    answer = good()
    holder = answer if field == "output_ids" else answer["meta_info"]
    target = holder[field]
    if isinstance(target, list) and index < len(target):
        target[index] = value
    else:
        holder[field] = value
    before = copy.deepcopy(answer)
    try:
        record = parse(answer)
    except RecordRejected:
        return
    # Whatever is accepted still satisfies the invariants.
    assert record.num_sampled == len(before["output_ids"]) == len(record.versions)
    assert np.isfinite(record.rollout_logprobs).all()
    assert (record.rollout_logprobs <= 1e-5).all()
    assert record.routes is not None
    record.routes.validate(record.num_tokens)


def with_violation() -> dict[str, Any]:
    """The first sampled token, 3, is outside its mask of 2 and 4, whose probability is 0.5; the likeliest id is 2."""
    answer = good()
    answer["meta_info"] |= {
        "output_token_sampling_mask": [[2, 4], [1]],
        "output_token_sampling_logprobs": [[math.log(0.8), math.log(0.2)], [0.0]],
        "output_top_logprobs": [[[math.log(0.4), 2, None]], [[math.log(0.9), 1, None]]],
    }
    return answer


def test_union_adds_the_sampled_token_and_renormalises() -> None:
    record = parse(with_violation(), RequestedFields(routes=True, mask=True, violation="union"))
    mask = record.sampling_mask
    assert mask is not None
    assert mask.logprobs is not None
    assert (mask.ids.tolist(), mask.offsets.tolist(), mask.violations) == ([2, 3, 4, 1], [0, 3, 4], 1)
    np.testing.assert_allclose(np.exp(mask.logprobs), [0.4 / 0.75, 0.25 / 0.75, 0.1 / 0.75, 1.0], rtol=1e-6)
    np.testing.assert_allclose(np.exp(record.rollout_logprobs), [0.25 / 0.75, 1.0], rtol=1e-6)
    assert record.scored.all()


def test_drop_empties_the_row() -> None:
    record = parse(with_violation(), RequestedFields(routes=True, mask=True, violation="drop"))
    mask = record.sampling_mask
    assert mask is not None
    assert (mask.ids.tolist(), mask.offsets.tolist(), mask.violations) == ([1], [0, 0, 1], 1)
    assert record.scored.tolist() == [False, True]
    assert record.num_sampled == 2


@pytest.mark.parametrize("violation", ["reject", "union", "drop"])
def test_violations_that_cannot_be_mended_reject(violation: Literal["reject", "union", "drop"]) -> None:
    answer = with_violation()
    answer["meta_info"] |= {"output_top_logprobs": None, "output_token_sampling_mask": [[2, 4], [5]]}
    with pytest.raises(RecordRejected) as caught:
        parse(answer, RequestedFields(routes=True, mask=True, violation=violation))
    assert caught.value.reason == "mask_violation"


@pytest.mark.parametrize("violation", ["union", "drop"])
def test_other_faults_are_never_mended(violation: Literal["union", "drop"]) -> None:
    answer = with_violation()
    set_meta(output_token_sampling_mask=[[2, 4], []], output_token_sampling_logprobs=[[HALF, HALF], []])(answer)
    with pytest.raises(RecordRejected) as caught:
        parse(answer, RequestedFields(routes=True, mask=True, violation=violation))
    assert caught.value.reason == "mask_empty"
