"""Log-probs of a teacher for every sampled token, from servers of its own: on-policy distillation.

The teacher is served beside the run and never trained. It scores finished samples by prefill, while others are being
sampled. Shape letters: T tokens of a row, S sampled ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from moe_trm.errors import EngineError, RecordRejected
from moe_trm.rollout.sampler import Sampler
from moe_trm.rollout.servers.http import EngineHttp
from moe_trm.types import Prompt, RolloutRecord, SamplingParams

SCORED_TWICE = 64
"""One row of so many is scored twice: the difference is what the teacher's own arithmetic and routes make."""


class TaughtSampler:
    """`Sampler` whose samples carry the teacher's log-probs, in `RolloutRecord.teacher_logprobs`.

    They are over the whole vocabulary at temperature 1. Teacher and policy have the same token ids.

    Source: on-policy distillation (GKD, arXiv 2306.13649), with the sampled token's log-probs alone.

    Args:
        sampler: makes samples and answers.
        servers: SGLang servers of the teacher; each row goes to the next one.
    """

    def __init__(self, sampler: Sampler, servers: Sequence[EngineHttp]) -> None:
        self._sampler, self._servers = sampler, servers
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
        for server in self._servers:
            await server.close()
        await self._sampler.close()

    async def _taught(self, row: RolloutRecord) -> RolloutRecord:
        server, repeats = self._servers[self._rows % len(self._servers)], self._rows % SCORED_TWICE == 0
        self._rows, self._tokens = self._rows + 1, self._tokens + row.num_sampled
        logprobs = await _logprobs(server, row)
        if repeats and row.num_sampled:
            again = await _logprobs(server, row)
            self._twice, self._gap = self._twice + row.num_sampled, self._gap + float(np.abs(again - logprobs).sum())
        return row.changed(teacher_logprobs=logprobs)


async def _logprobs(server: EngineHttp, row: RolloutRecord) -> np.ndarray:
    """`[S]` float32 log-probs of the row's sampled tokens, by one prefill."""
    tokens = row.tokens.tolist()
    # The first token has none, and is never sampled.
    answer = await server.post(
        "/generate",
        {
            "input_ids": tokens,
            "sampling_params": {"temperature": 1.0, "max_new_tokens": 1},
            "return_logprob": True,
            "logprob_start_len": 0,
        },
    )
    scored = answer.get("meta_info", {}).get("input_token_logprobs", [])
    told = [entry[1] for entry in scored]
    # SGLang writes 0 for the last id of the vocabulary, which it takes for the place of an image.
    if told not in (tokens, [0 if token == max(tokens) else token for token in tokens]):
        raise EngineError(
            "the teacher's answer is not of the tokens that it was sent",
            where=server.url,
            got=f"log-probs of {len(scored)} tokens",
            expected=f"those of the {len(tokens)} tokens of sample {row.sample_id}",
            fix="kl.teacher names SGLang servers whose model has the policy's tokens",
        )
    logprobs = np.array([entry[0] for entry, sampled in zip(scored, row.sampled, strict=True) if sampled], np.float32)
    if not np.isfinite(logprobs).all():
        raise RecordRejected(
            "teacher_nan",
            "the teacher gave log-probs that are not finite",
            where=f"sample {row.sample_id}",
            got=f"{int((~np.isfinite(logprobs)).sum())} of {len(logprobs)}",
            expected="finite log-probs",
        )
    return logprobs
