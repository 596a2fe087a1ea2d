"""The learner's own policy as a rollout engine: the model of transformers, in the learner's dtype.

A served policy differs from it by the engine's arithmetic, and by weights that the server rounds. It answers one
request after the other, so it is for small models and small sets of prompts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_trm.config.engines import EngineTraits
from moe_trm.errors import LearnerError, RecordRejected
from moe_trm.learner.deepspeed.policy import load_policy
from moe_trm.learner.hf_checkpoint import HfCheckpoint
from moe_trm.rollout.sessions.conversation import Conversation
from moe_trm.sync.manifest import Share, WeightPush
from moe_trm.types import Prompt, RolloutRecord, SampledTurn, SamplingParams, ServerState


class OwnPolicy:
    """`RolloutEngine` in this process, with the learner's dtype. Its records have neither routes nor masks.

    The same requests in the same order have the same answers under one `seed`. `max_positions`: tokens of a sequence at
    most; None: no limit.
    """

    traits = EngineTraits(records_routes=False, records_masks=False)

    def __init__(self, dtype: str, seed: int, max_positions: int | None) -> None:
        self._dtype, self._max_positions = dtype, max_positions
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._random = torch.Generator(self._device).manual_seed(seed)
        self._causal: Any = None
        self._version, self._turn = 0, asyncio.Lock()

    async def start(self) -> None:
        """Nothing to wait for: `load_weights` brings the model."""

    def expect(self, version: int) -> None:
        """Nothing to do: answers are computed when they are asked for."""

    async def generate(self, prompt: Prompt, params: SamplingParams, *, sample_id: int, group_id: int) -> RolloutRecord:
        """Sample one continuation."""
        conversation = Conversation(prompt)
        conversation.add(await self.turn(prompt.token_ids, params))
        return conversation.record(sample_id=sample_id, group_id=group_id, keep_changed=False)

    async def turn(
        self, context: Sequence[int], params: SamplingParams, *, start: int = 0, bare: bool = False
    ) -> SampledTurn:
        """Sample what comes after `context`; one answer at a time, in the order of requests."""
        async with self._turn:
            return await asyncio.to_thread(self._answer, tuple(context), params)

    async def load_weights(self, push: WeightPush) -> None:
        """Take the model in the push's folder. Raises `CheckpointError` for one that transformers cannot load."""
        policy = load_policy(HfCheckpoint(Path(push.directory)), self._dtype, recompute=False)
        self._causal, self._version = policy.causal.to(self._device).eval(), push.version

    async def receive_weights(self, version: int, shares: Sequence[Share]) -> None:
        """Never asked for (`traits`)."""
        raise LearnerError("this engine takes no broadcast", where="evaluation by the learner's own policy")

    async def release_memory(self) -> None:
        """Keeps its memory."""

    def metrics(self) -> dict[str, float]:
        """Nothing is counted."""
        return {}

    def servers(self) -> tuple[ServerState, ...]:
        """It has none."""
        return ()

    async def close(self) -> None:
        """Free the model."""
        self._causal = None

    @torch.no_grad()
    def _answer(self, context: tuple[int, ...], params: SamplingParams) -> SampledTurn:
        tokens: list[int] = []
        drawn: list[float] = []
        full: list[float] = []
        cache, inputs = None, list(context)
        room = params.max_new_tokens
        if self._max_positions is not None:
            room = min(room, self._max_positions - len(context))
        if room < 1:
            raise RecordRejected(
                "empty_output",
                "the prompt leaves no room for an answer",
                got=f"{len(context)} tokens",
                expected=f"fewer than the model's {self._max_positions} positions",
            )
        finish = "length"
        while len(tokens) < room:
            output = self._causal(
                input_ids=torch.tensor([inputs], device=self._device), past_key_values=cache, use_cache=True
            )
            cache = output.past_key_values
            logprobs_V = torch.log_softmax(output.logits[0, -1].float() / params.temperature, -1)
            kept_V = _kept(logprobs_V, params)
            token = int(
                kept_V.argmax() if params.top_k == 1 else torch.multinomial(kept_V.exp(), 1, generator=self._random)
            )
            tokens.append(token)
            drawn.append(float(kept_V[token]))
            full.append(float(logprobs_V[token]))
            inputs = [token]
            if token in params.stop_token_ids:
                finish = "stop"
                break
        return SampledTurn(
            tokens=np.array(tokens, np.int32),
            rollout_logprobs=np.array(drawn, np.float32),
            full_logprobs=np.array(full, np.float32),
            versions=np.full(len(tokens), self._version, np.int32),
            routes=None,
            sampling_mask=None,
            finish_reason=finish,
        )


def _kept(logprobs_V: Tensor, params: SamplingParams) -> Tensor:
    """Log-probs over what top-k, top-p and min-p keep; -inf elsewhere."""
    sorted_V, order_V = logprobs_V.sort(descending=True, stable=True)
    mass_before_V = sorted_V.exp().cumsum(-1) - sorted_V.exp()
    keep_V = mass_before_V < params.top_p
    keep_V &= torch.arange(len(sorted_V), device=sorted_V.device) < params.top_k
    keep_V &= sorted_V >= sorted_V[0] + (float(np.log(params.min_p)) if params.min_p else -torch.inf)
    keep_V[0] = True
    kept_V = torch.full_like(logprobs_V, -torch.inf)
    kept_V[order_V[keep_V]] = torch.log_softmax(sorted_V[keep_V], -1)
    return kept_V
