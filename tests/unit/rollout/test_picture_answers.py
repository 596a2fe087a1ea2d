"""Requests with pictures, and answers whose image tokens are not those that the learner forwards."""

from __future__ import annotations

import asyncio
import base64
from dataclasses import replace
from typing import Any

import pytest

from moe_trm.errors import BundleError, RecordRejected
from moe_trm.recording.bundle import BundleWriter
from moe_trm.rollout.recorded import BundleEngine
from moe_trm.rollout.servers.question import Question, RequestedFields
from moe_trm.rollout.sglang.request import generate_request
from moe_trm.rollout.sglang.served_shape import unpredicted
from moe_trm.step.fixed_texts import fixed_ids
from moe_trm.sync.manifest import WeightPush
from moe_trm.types import Prompt, SamplingParams
from tests.unit.records import make_record
from tests.unit.rollout import test_parse as plain

IMAGE = 6
MODEL = replace(plain.MODEL, architecture="Qwen3VLMoeForConditionalGeneration", image=IMAGE, reserved=frozenset({2, 6}))
REQUESTED = RequestedFields(routes=False, mask=False)


def parse(answer: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(plain, "MODEL", MODEL)
    return plain.parse(answer, REQUESTED)


def test_a_request_has_the_placeholders_and_the_pictures() -> None:
    question = Question((4, 6, 6, 6, 5, 9), SamplingParams(), REQUESTED, pictures=(b"a picture",), image=IMAGE)
    request = generate_request(question)
    assert request["input_ids"] == [4, 6, 5, 9]
    assert request["image_data"] == [base64.b64encode(b"a picture").decode()]
    assert "image_data" not in generate_request(replace(question, pictures=(), context=(4, 9)))


def test_an_answer_with_the_same_image_tokens_becomes_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse(plain.good(), monkeypatch).tokens.tolist() == [5, 6, 7, 3, 1]


@pytest.mark.parametrize(
    "change",
    [
        {"prompt_token_ids": [5, 6, 6, 7]},
        {"prompt_token_ids": [5, 7]},
        {"prompt_token_ids": None},
        {"output_ids": [3, 6]},
        {"output_ids": [2, 1]},
    ],
)
def test_other_image_tokens_reject_the_record(change: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    answer = plain.good() | change
    with pytest.raises(RecordRejected) as caught:
        parse(answer, monkeypatch)
    assert caught.value.reason == "image_tokens"


def test_checksums_of_a_vision_tower_are_not_predicted() -> None:
    assert not unpredicted({}, plain.MODEL)
    assert "vision tower" in unpredicted({}, MODEL)


def test_texts_of_proofs_have_no_image_tokens() -> None:
    assert {IMAGE, 2} <= {*fixed_ids(16).flatten().tolist()}
    assert not {IMAGE, 2} & {*fixed_ids(16, MODEL.reserved).flatten().tolist()}


def test_a_recording_of_other_pictures_is_refused(tmp_path: Any) -> None:
    record = replace(make_record(), pictures=(b"red",))
    BundleWriter(str(tmp_path)).write(1, [record])
    engine = BundleEngine(str(tmp_path))

    async def ask(pictures: tuple[bytes, ...]) -> tuple[bytes, ...]:
        await engine.start()
        await engine.load_weights(WeightPush(0, "", ()))
        prompt = Prompt(record.prompt_id, tuple(record.tokens[:4].tolist()), pictures=pictures)
        answer = await engine.generate(prompt, SamplingParams(), sample_id=0, group_id=0)
        return answer.pictures

    assert asyncio.run(ask((b"red",))) == (b"red",)
    for pictures in ((b"blue",), ()):
        with pytest.raises(BundleError, match="other prompts"):
            asyncio.run(ask(pictures))
