"""Routes taken apart from an answer leave the reading of it as it was, wherever they stand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_trm.errors import RecordRejected
from moe_trm.rollout.sglang import answer_form, apart
from moe_trm.rollout.sglang.answer_form import Answer, decode_answer
from moe_trm.rollout.sglang.apart import without_routes

WORDS = st.sampled_from(
    ['"routed_experts"', ',"routed_experts":"', '"', "\\", "A", ":", "{", ",", "é", "\n", "routed_experts"]
)
TEXT = st.lists(WORDS, max_size=6).map("".join)
VALUE = st.one_of(
    TEXT, st.none(), st.integers(0, 9), st.lists(TEXT, max_size=2), st.dictionaries(TEXT, TEXT, max_size=2)
)
FIELD = st.tuples(st.one_of(st.just("routed_experts"), TEXT), VALUE)


@pytest.fixture(scope="module", autouse=True)
def none_is_short() -> Iterator[None]:
    """The answers here are few bytes, and are read as long ones are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answer_form, "SHORT_BYTES", 0)
        yield


def outcome(read: Any, body: bytes) -> object:
    try:
        answer = read(body)
    except RecordRejected as rejection:
        return rejection.got
    except msgspec.DecodeError as error:
        return str(error)
    return msgspec.structs.astuple(answer.meta_info)[:-1], answer.output_ids, bytes(answer.meta_info.routed_experts)


def pairs(fields: list[tuple[str, object]], colon: str, comma: str) -> str:
    """A JSON object; names may come again."""
    return "{" + comma.join(json.dumps(name) + colon + json.dumps(value) for name, value in fields) + "}"


@settings(max_examples=150)
@given(
    st.lists(FIELD, max_size=4),
    st.lists(FIELD, max_size=2),
    st.sampled_from([":", " : "]),
    st.sampled_from([",", " ,\n"]),
    st.data(),
)
def test_an_answer_reads_as_it_does_in_one_piece(
    fields: list[tuple[str, object]], around: list[tuple[str, object]], colon: str, comma: str, data: st.DataObject
) -> None:
    meta = pairs([("finish_reason", {"type": "stop"}), *fields], colon, comma)
    outside = pairs([("output_ids", [1]), *around], colon, comma)
    body = f'{outside[:-1]}{comma}"meta_info"{colon}{meta}}}'.encode()
    cut = data.draw(st.integers(0, len(body)), "cut")
    for text in (body, body[:cut], body[:cut] + b'"' + body[cut:]):
        assert outcome(decode_answer, text) == outcome(msgspec.json.Decoder(Answer).decode, text)


@pytest.mark.parametrize("part", [1, 2, 7, 16, 17, 1 << 17])
@pytest.mark.parametrize("payload", ["", "AAAA", "A" * 100])
def test_routes_are_found_over_the_ends_of_parts(part: int, payload: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apart, "_PART", part)
    body = json.dumps({"a": [1, "b"], "routed_experts": payload, "c": {"d": 'routed_experts"'}}).encode()
    found = without_routes(memoryview(body))
    assert found is not None
    assert json.loads(found[0]) == {"a": [1, "b"], "routed_experts": "", "c": {"d": 'routed_experts"'}}
    assert bytes(found[1]) == json.dumps(payload).encode()


@pytest.mark.parametrize(
    "body",
    [
        "",
        "{}",
        '"routed_experts":"AAAA"',
        '{"routed_experts":null}',
        '{"routed_experts":["AAAA"]}',
        '{"routed_experts":"AA',
        '{"routed_experts":"AA\\"AA"}',
        '{"routed_experts":"AAAA","routed_experts":"BBBB"}',
        '{"a\\"routed_experts":"AAAA"}',
    ],
)
def test_what_is_not_plain_is_read_in_one_piece(body: str) -> None:
    assert without_routes(body.encode()) is None


def test_the_routes_are_not_copied() -> None:
    body = memoryview(b'{"output_ids":[1],"meta_info":{"finish_reason":null,"routed_experts":"AAAA"}}')
    found = without_routes(body)
    assert found is not None
    assert found[1].obj is body.obj
    assert bytes(decode_answer(body).meta_info.routed_experts) == b'"AAAA"'
