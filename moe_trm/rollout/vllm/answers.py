"""The form of vLLM's requests and answers, without what only the controller needs."""

from __future__ import annotations

from moe_trm.rollout.servers.question import AnswerFormat, Question
from moe_trm.rollout.servers.served_model import ServedModel
from moe_trm.rollout.vllm.parse import parse_turn
from moe_trm.rollout.vllm.request import generate_request
from moe_trm.types import SampledTurn


class VllmAnswers(AnswerFormat):
    """Tokens in, tokens out: `/inference/v1/generate`."""

    generate_path = "/inference/v1/generate"

    def request(self, question: Question) -> dict[str, object]:
        """See `generate_request`."""
        return generate_request(question)

    def parse(self, body: bytes | memoryview, question: Question, model: ServedModel) -> SampledTurn:
        """See `parse_turn`."""
        return parse_turn(body, question, model)
