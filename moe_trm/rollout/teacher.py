"""Log-probs of a teacher for every sampled token, from servers of its own: on-policy distillation.

The teacher is served beside the run and never trained. It scores finished samples by prefill, while others are being
sampled. Shape letters: T tokens of a row, S sampled ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from moe_trm.errors import RecordRejected
from moe_trm.rollout.sampler import Sampler
from moe_trm.rollout.servers.arrival import ANSWER_S, Arrival
from moe_trm.rollout.servers.backend import ServerBackend
from moe_trm.rollout.servers.http import EngineHttp
from moe_trm.runtime.patience import patient
from moe_trm.types import Prompt, RolloutRecord, SamplingParams

SCORED_TWICE = 64
"""One row of so many is scored twice: the difference is what the teacher's own arithmetic and routes make."""


class TaughtSampler:
    """`Sampler` whose samples carry the teacher's log-probs, in `RolloutRecord.teacher_logprobs`.

    They are over the whole vocabulary at temperature 1. Teacher and policy have the same token ids. Each row goes to
    the next of `servers`, which may take `loads_s` seconds to load. Source: on-policy distillation (GKD,
    arXiv 2306.13649), with the sampled token's log-probs alone.
    """

    def __init__(
        self, sampler: Sampler, servers: Sequence[EngineHttp], backend: ServerBackend, loads_s: float = 0.0
    ) -> None:
        self._sampler, self._servers, self._backend = sampler, servers, backend
        self._loads_s, self._arrived = loads_s, dict[EngineHttp, asyncio.Task[bytes]]()
        self._rows, self._tokens, self._twice, self._gap = 0, 0, 0, 0.0

    async def sample(self, prompt: Prompt, *, sample_id: int, group_id: int) -> RolloutRecord:
        """See `Sampler.sample`.

        Raises:
            RecordRejected: `teacher_nan`, a log-prob of the teacher is not finite.
            EngineError: the teacher did not answer, or not with the log-probs of these tokens.
        """
        record = await self._sampler.sample(prompt, sample_id=sample_id, group_id=group_id)
        first, *further = await asyncio.gather(*map(self._taught, record.rows))
        return replace(first, further=tuple(further))

    async def answer(self, prompt: Prompt, params: SamplingParams) -> RolloutRecord:
        """See `Sampler.answer`; evaluations have no teacher."""
        return await self._sampler.answer(prompt, params)

    def metrics(self) -> dict[str, float]:
        """`teacher/tokens`, those it scored since the run began. `teacher/repeat_abs_diff`, nats: mean absolute
        difference of the log-probs of rows that it scored twice.
        """
        repeated = {"teacher/repeat_abs_diff": self._gap / self._twice} if self._twice else {}
        return {**self._sampler.metrics(), "teacher/tokens": float(self._tokens), **repeated}

    async def close(self) -> None:
        """Release the connections and the sampler."""
        for arrival in self._arrived.values():
            arrival.cancel()
        for server in self._servers:
            await server.close()
        await self._sampler.close()

    async def _taught(self, row: RolloutRecord) -> RolloutRecord:
        server, repeats = self._servers[self._rows % len(self._servers)], self._rows % SCORED_TWICE == 0
        self._rows, self._tokens = self._rows + 1, self._tokens + row.num_sampled
        logprobs = await self._logprobs(server, row)
        if repeats and row.num_sampled:
            again = await self._logprobs(server, row)
            self._twice, self._gap = self._twice + row.num_sampled, self._gap + float(np.abs(again - logprobs).sum())
        return row.changed(teacher_logprobs=logprobs)

    async def _logprobs(self, server: EngineHttp, row: RolloutRecord) -> np.ndarray:
        """`[S]` float32 log-probs of the row's sampled tokens, by one prefill."""
        if server not in self._arrived:
            arrival, path = Arrival(server.url, self._loads_s), self._backend.health_path
            ask = arrival.of(lambda: server.request("GET", path, timeout_s=patient(ANSWER_S), attempts=1))
            self._arrived[server] = asyncio.create_task(ask)
        await asyncio.shield(self._arrived[server])
        scored = await self._backend.prefilled(server, row.tokens.tolist())
        logprobs: np.ndarray = scored[row.sampled[1:]].astype(np.float32)  # the first token is never sampled
        if not np.isfinite(logprobs).all():
            raise RecordRejected(
                "teacher_nan",
                "the teacher gave log-probs that are not finite",
                where=f"sample {row.sample_id}",
                got=f"{int((~np.isfinite(logprobs)).sum())} of {len(logprobs)}",
                expected="finite log-probs",
            )
        return logprobs
