"""The form of vLLM's requests and answers, without what only the controller needs."""

from __future__ import annotations

from moe_trm.rollout.servers.question import AnswerFormat
from moe_trm.rollout.vllm.parse import parse_turn
from moe_trm.rollout.vllm.request import generate_request


class VllmAnswers(AnswerFormat):
    """Tokens in, tokens out: `/inference/v1/generate`."""

    generate_path = "/inference/v1/generate"
    request, parse = staticmethod(generate_request), staticmethod(parse_turn)
