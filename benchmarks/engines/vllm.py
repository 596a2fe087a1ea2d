"""vLLM's dialect of `ServerScorer`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.engines.server import EngineAnswer, ServerScorer
from moe_trm.rollout.servers.http import EngineHttp
from moe_trm.rollout.vllm.answers import VllmAnswers
from routing import RouteRecord
from routing.vllm import decode_payload


class VllmScorer(ServerScorer):
    """By `/inference/v1/generate`."""

    async def _decoded(
        self, http: EngineHttp, token_ids: Sequence[int], max_new_tokens: int, stop: Sequence[int]
    ) -> EngineAnswer:
        answer = await self._ask(http, token_ids, max_tokens=max_new_tokens, stop_token_ids=[*stop], logprobs=0)
        [choice] = answer["choices"]
        logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        return EngineAnswer(choice["token_ids"], logprobs, choice["routed_experts"])

    async def _prefilled(self, http: EngineHttp, token_ids: Sequence[int]) -> EngineAnswer:
        answer = await self._ask(http, token_ids, max_tokens=1, prompt_logprobs=0)
        [choice] = answer["choices"]
        places = zip(answer["prompt_logprobs"][1:], token_ids[1:], strict=True)
        return EngineAnswer(
            choice["token_ids"],
            [logprobs_by_id[str(token)]["logprob"] for logprobs_by_id, token in places],
            choice["routed_experts"],
        )

    def _decode(self, payload: Any, **shape: Any) -> RouteRecord:
        return decode_payload(payload, **shape)

    async def _ask(self, http: EngineHttp, token_ids: Sequence[int], **params: Any) -> Any:
        sampling = {"temperature": 1.0, "ignore_eos": True, "detokenize": False, **params}
        return await http.post(VllmAnswers.generate_path, {"token_ids": [*token_ids], "sampling_params": sampling})
