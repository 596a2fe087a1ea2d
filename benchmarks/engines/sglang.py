"""SGLang's dialect of `ServerScorer`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.engines.server import EngineAnswer, ServerScorer
from moe_trm.rollout.servers.http import EngineHttp
from routing import RouteRecord
from routing.sglang import decode_payload


class SglangScorer(ServerScorer):
    """By `/generate`."""

    async def _decoded(
        self, http: EngineHttp, token_ids: Sequence[int], max_new_tokens: int, stop: Sequence[int]
    ) -> EngineAnswer:
        params = {"temperature": 1.0, "max_new_tokens": max_new_tokens, "stop_token_ids": list(stop)}
        answer = await self._ask(http, token_ids, params)
        meta = answer["meta_info"]
        logprobs = [entry[0] for entry in meta["output_token_logprobs"]]
        return EngineAnswer(answer["output_ids"], logprobs, meta["routed_experts"])

    async def _prefilled(self, http: EngineHttp, token_ids: Sequence[int]) -> EngineAnswer:
        params = {"temperature": 1.0, "max_new_tokens": 1}
        answer = await self._ask(http, token_ids, params, logprob_start_len=0)
        meta = answer["meta_info"]
        logprobs = [entry[0] for entry in meta["input_token_logprobs"][1:]]
        return EngineAnswer(answer["output_ids"], logprobs, meta["routed_experts"])

    def _decode(self, payload: Any, **shape: Any) -> RouteRecord:
        return decode_payload(payload, **shape)

    async def _begin(self, http: EngineHttp) -> None:
        await http.request("POST", "/flush_cache")

    async def _ask(self, http: EngineHttp, token_ids: Sequence[int], params: dict[str, Any], **more: int) -> Any:
        return await http.post(
            "/generate",
            {
                "input_ids": [*token_ids],
                "sampling_params": params,
                "return_logprob": True,
                "return_routed_experts": True,
                **more,
            },
        )
