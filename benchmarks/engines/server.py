"""A real rollout server as sampler (decoding) and as scorer of given tokens (prefill)."""

from __future__ import annotations

import asyncio
import secrets
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from benchmarks.engines.scored import Scored, Setting, Text
from moe_trm.config.schema import Config
from moe_trm.rollout.servers.backend import Served
from moe_trm.rollout.servers.http import EngineHttp
from moe_trm.rollout.servers.process import Server, start_server
from moe_trm.rollout.servers.served_model import ServedModel
from moe_trm.types import Prompt
from routing import RouteRecord, token_digest

T = TypeVar("T")


@dataclass(frozen=True)
class EngineAnswer:
    """An answer of the engine: the ids that came out, log-probs, and the payload of the routes of all tokens."""

    output_ids: Sequence[int]
    logprobs: Sequence[float]
    payload: Any


@contextmanager
def started(setting: Setting, extra_args: Sequence[str] = ()) -> Iterator[Server]:
    """A server on the checkpoint, for the time of the context."""
    server_settings = {
        "port": 0,
        "dtype": setting.dtype,
        "max_running_requests": setting.together,
        "startup_timeout_s": 900,
        "extra_args": [*extra_args],
    }
    config = Config.model_validate(
        {
            "model": {"checkpoint": str(setting.checkpoint)},
            "rollout": {"engine": setting.engine, "server": server_settings},
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        server = start_server(Served.of(config), Path(folder) / "rollout.log", secrets.token_hex(8))
        try:
            yield server
        finally:
            server.stop()


class ServerScorer(ABC):
    """See `Scorer`; it cannot replay."""

    local_flips: float | None = None

    def __init__(self, server: Server, setting: Setting) -> None:
        self._server, self._together = server, setting.together
        self._model = ServedModel.from_checkpoint(setting.checkpoint)

    def sample(
        self, prompts: Sequence[Prompt], group_size: int, max_new_tokens: int, stop: tuple[int, ...]
    ) -> tuple[list[Text], list[Scored]]:
        """Answers at temperature 1 over the whole vocabulary, with the log-probs and routes of decoding itself."""

        async def decoded_text(http: EngineHttp, number: int, prompt: Prompt) -> tuple[Text, Scored]:
            answer = await self._decoded(http, prompt.token_ids, max_new_tokens, stop)
            tokens = np.array([*prompt.token_ids, *answer.output_ids], np.int32)
            text = Text(tokens, np.arange(len(tokens)) >= len(prompt.token_ids), number)
            logprobs = np.full(len(tokens) - 1, np.nan, np.float32)
            logprobs[text.rows] = answer.logprobs
            return text, Scored(logprobs, self._routes(answer, tokens, tokens))

        work = [(number, prompt) for number, prompt in enumerate(prompts) for _ in range(group_size)]
        done = self._run(lambda http, item: decoded_text(http, *item), work)
        return [text for text, _ in done], [scored for _, scored in done]

    def score(self, texts: Sequence[Text], routes: Sequence[RouteRecord] | None = None) -> list[Scored]:
        """See `Scorer.score`; by prefill, without any prefix cache."""
        assert routes is None, "servers compute with their own routes"

        async def scores_of(http: EngineHttp, text: Text) -> Scored:
            answer = await self._prefilled(http, text.tokens.tolist())
            all_tokens = np.append(text.tokens, answer.output_ids).astype(np.int32)
            return Scored(np.array(answer.logprobs, np.float32), self._routes(answer, all_tokens, text.tokens))

        return self._run(scores_of, list(texts))

    @abstractmethod
    async def _decoded(
        self, http: EngineHttp, token_ids: Sequence[int], max_new_tokens: int, stop: Sequence[int]
    ) -> EngineAnswer:
        """An answer, with the log-probs of its tokens."""

    @abstractmethod
    async def _prefilled(self, http: EngineHttp, token_ids: Sequence[int]) -> EngineAnswer:
        """One token more, with the log-probs of the given ones after the first."""

    @abstractmethod
    def _decode(self, payload: Any, **shape: Any) -> RouteRecord:
        """The routes in a payload."""

    async def _begin(self, http: EngineHttp) -> None:  # noqa: B027 (not every server needs it)
        """Before the first request."""

    def _routes(self, answer: EngineAnswer, all_tokens: np.ndarray, tokens: np.ndarray) -> RouteRecord:
        """Routes of `tokens`, which come first in the payload for `all_tokens`."""
        model = self._model
        record = self._decode(
            answer.payload,
            tokens=all_tokens,
            num_layers=model.num_layers,
            layer_ids=model.moe_layer_ids,
            num_experts=model.num_experts,
            top_k=model.top_k,
        )
        rows = len(tokens) - 1
        return replace(record, experts=record.experts[:rows], token_digest=token_digest(tokens))

    def _run(self, request: Callable[[EngineHttp, Any], Awaitable[T]], items: Sequence[Any]) -> list[T]:
        async def everything() -> list[T]:
            slots = asyncio.Semaphore(self._together)
            http = EngineHttp(self._server.url, self._server.api_key, timeout_s=120, max_attempts=1)

            async def bounded(item: Any) -> T:
                async with slots:
                    return await request(http, item)

            async with http:
                await self._begin(http)
                return await asyncio.gather(*map(bounded, items))

        return asyncio.run(everything())
