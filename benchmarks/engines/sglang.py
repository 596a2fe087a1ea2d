"""A real SGLang server as sampler (decoding) and as scorer of given tokens (prefill)."""

from __future__ import annotations

import asyncio
import secrets
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from benchmarks.engines.scored import Scored, Setting, Text
from moe_trm.config.schema import Config
from moe_trm.rollout.servers.http import EngineHttp
from moe_trm.rollout.servers.process import Server, start_server
from moe_trm.rollout.servers.served_model import ServedModel
from moe_trm.types import Prompt
from routing import RouteRecord, token_digest
from routing.sglang import decode_payload

T = TypeVar("T")


@contextmanager
def serving(setting: Setting) -> Iterator[SglangScorer]:
    """A server on the checkpoint, for the time of the context."""
    server_settings = {
        "port": 0,
        "dtype": setting.dtype,
        "max_running_requests": setting.together,
        "startup_timeout_s": 600,
    }
    config = Config.model_validate(
        {"model": {"checkpoint": str(setting.checkpoint)}, "rollout": {"server": server_settings}}
    )
    with tempfile.TemporaryDirectory() as folder:
        server = start_server(config, Path(folder) / "rollout.log", secrets.token_hex(8))
        try:
            yield SglangScorer(server, setting)
        finally:
            server.stop()


class SglangScorer:
    """See `Scorer`; it cannot replay."""

    local_flips: float | None = None

    def __init__(self, server: Server, setting: Setting) -> None:
        self._server, self._together = server, setting.together
        self._model = ServedModel.from_checkpoint(setting.checkpoint)

    def sample(
        self, prompts: Sequence[Prompt], group_size: int, max_new_tokens: int, stop: tuple[int, ...]
    ) -> tuple[list[Text], list[Scored]]:
        """Answers at temperature 1 over the whole vocabulary, with the log-probs and routes of decoding itself."""
        params = {"temperature": 1.0, "max_new_tokens": max_new_tokens, "stop_token_ids": list(stop)}

        async def one(http: EngineHttp, number: int, prompt: Prompt) -> tuple[Text, Scored]:
            answer = await self._ask(http, list(prompt.token_ids), params)
            tokens = np.array([*prompt.token_ids, *answer["output_ids"]], np.int32)
            text = Text(tokens, np.arange(len(tokens)) >= len(prompt.token_ids), number)
            logprobs = np.full(len(tokens) - 1, np.nan, np.float32)
            logprobs[text.rows] = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
            return text, Scored(logprobs, self._routes(answer, tokens, tokens))

        work = [(number, prompt) for number, prompt in enumerate(prompts) for _ in range(group_size)]
        done = self._run(lambda http, item: one(http, *item), work)
        return [text for text, _ in done], [scored for _, scored in done]

    def score(self, texts: Sequence[Text], routes: Sequence[RouteRecord] | None = None) -> list[Scored]:
        """See `Scorer.score`; by prefill, without any prefix cache."""
        assert routes is None, "SGLang computes with its own routes"

        async def one(http: EngineHttp, text: Text) -> Scored:
            params = {"temperature": 1.0, "max_new_tokens": 1}
            answer = await self._ask(http, text.tokens.tolist(), params, logprob_start_len=0)
            logprobs = np.array([entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:]], np.float32)
            whole = np.append(text.tokens, answer["output_ids"]).astype(np.int32)
            return Scored(logprobs, self._routes(answer, whole, text.tokens))

        return self._run(one, list(texts))

    def _routes(self, answer: Any, whole: np.ndarray, tokens: np.ndarray) -> RouteRecord:
        """Routes of the first rows, those of `tokens`, out of the payload for `whole`."""
        model = self._model
        record = decode_payload(
            answer["meta_info"]["routed_experts"],
            tokens=whole,
            num_layers=model.num_layers,
            layer_ids=model.moe_layer_ids,
            num_experts=model.num_experts,
            top_k=model.top_k,
        )
        rows = len(tokens) - 1
        return replace(record, experts=record.experts[:rows], token_digest=token_digest(tokens))

    async def _ask(self, http: EngineHttp, input_ids: list[int], params: dict[str, Any], **more: int) -> Any:
        return await http.post(
            "/generate",
            {
                "input_ids": input_ids,
                "sampling_params": params,
                "return_logprob": True,
                "return_routed_experts": True,
                **more,
            },
        )

    def _run(self, one: Callable[[EngineHttp, Any], Awaitable[T]], items: Sequence[Any]) -> list[T]:
        async def everything() -> list[T]:
            slots = asyncio.Semaphore(self._together)
            http = EngineHttp(self._server.url, self._server.api_key, timeout_s=120, max_attempts=1)

            async def bounded(item: Any) -> T:
                async with slots:
                    return await one(http, item)

            async with http:
                await http.request("POST", "/flush_cache")
                return await asyncio.gather(*map(bounded, items))

        return asyncio.run(everything())
