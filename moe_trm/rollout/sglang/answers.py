"""The form of SGLang's requests and answers, without what only the controller needs."""

from __future__ import annotations

from moe_trm.rollout.servers.question import AnswerFormat, Question
from moe_trm.rollout.servers.served_model import ServedModel
from moe_trm.rollout.sglang.parse import parse_turn
from moe_trm.rollout.sglang.request import generate_request
from moe_trm.types import SampledTurn


class SglangAnswers(AnswerFormat):
    """`/generate`."""

    request = staticmethod(generate_request)

    def parse(self, body: bytes | memoryview, question: Question, model: ServedModel) -> SampledTurn:
        """See `parse_turn`."""
        return parse_turn(
            body, question.context, model, question.requested, start=question.start, request_id=question.request_id
        )
