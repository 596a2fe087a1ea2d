"""A rollout engine that samples from fused logits of a teacher and the policy, with plain transformers.

The next token is drawn from softmax(share z_teacher + (1 - share) z_policy). The share falls linearly with the version
of the weights, so that the last rollouts are the policy's own. It answers one request after the other, so it is for
small models.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from moe_trm.config.schema import Config
from moe_trm.learner.deepspeed.policy import load_policy
from moe_trm.learner.hf_checkpoint import HfCheckpoint
from moe_trm.models.hf_config import read_hf_config
from moe_trm.sync.manifest import WeightPush
from moe_trm.tools.evaluate.own_policy import OwnPolicy
from moe_trm.types import SampledTurn, SamplingParams

TEACHER = "LOGIT_FUSION_TEACHER"
"""Environment variable with the teacher's folder; its tokens are the policy's."""
SHARE, STEPS = 0.5, 30
"""The teacher's share of the logits at the start, and the version at which it is 0."""


def share_of(version: int) -> float:
    """The teacher's share of the logits under the weights of `version`."""
    return SHARE * max(0.0, 1 - version / STEPS)


class Engine(OwnPolicy):
    """`rollout.engine=examples/logit_fusion/engine.py:Engine`."""

    def __init__(self, config: Config, api_key: str | None) -> None:
        positions = read_hf_config(config.model.checkpoint).get("max_position_embeddings")
        super().__init__(config.learner.dtype, config.seed, positions)
        teacher = load_policy(HfCheckpoint(Path(os.environ[TEACHER])), config.learner.dtype, recompute=False)
        self._teacher = teacher.causal.to(self._device).eval()

    async def turn(
        self, context: Sequence[int], params: SamplingParams, *, start: int = 0, bare: bool = False
    ) -> SampledTurn:
        """Of both models; evaluations (`bare`) are of the policy alone."""
        async with self._turn:
            self._causal.share = 0.0 if bare else share_of(self._version)
            return await asyncio.to_thread(self._answer, tuple(context), params)

    async def load_weights(self, push: WeightPush) -> None:
        await super().load_weights(push)
        self._causal = Fused(self._causal, self._teacher)


class Fused:
    """Two causal models as one, called as transformers' are. `share` is the second one's part of the logits."""

    def __init__(self, policy: Any, teacher: Any) -> None:
        self._policy, self._teacher, self.share = policy, teacher, 0.0

    def __call__(self, *, input_ids: Tensor, past_key_values: Any, use_cache: bool) -> Any:
        caches = past_key_values or (None, None)
        policy, teacher = (
            model(input_ids=input_ids, past_key_values=cache, use_cache=use_cache)
            for model, cache in zip((self._policy, self._teacher), caches, strict=True)
        )
        fused = self.share * teacher.logits.float() + (1 - self.share) * policy.logits.float()
        return SimpleNamespace(logits=fused, past_key_values=(policy.past_key_values, teacher.past_key_values))
