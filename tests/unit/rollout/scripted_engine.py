"""A third rollout engine, whole in this file: answers by a script, with weights that are a version number.

`rollout.engine=tests/unit/rollout/scripted_engine.py:ScriptedEngine` is all that names it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from moe_trm.config.engines import EngineTraits
from moe_trm.config.schema import Config
from moe_trm.errors import RecordRejected
from moe_trm.rollout.sessions.conversation import Conversation
from moe_trm.sync.manifest import Share, WeightPush
from moe_trm.types import Prompt, RolloutRecord, SampledTurn, SamplingParams

SCRIPT = ((3, 4, 2), (4, 2), (3, 3, 3, 2))
"""The answers, by sample id in turn; 2 ends an answer."""
REJECTED = 5
"""The sample that the engine cannot answer."""


class ScriptedEngine:
    """`RolloutEngine` without routes, masks or servers."""

    traits = EngineTraits(records_routes=False, records_masks=False)

    def __init__(self, config: Config, api_key: str | None) -> None:
        self.steps, self.started, self.closed = config.train.steps, False, False
        self.versions: list[int] = []

    async def start(self) -> None:
        self.started = True

    async def generate(self, prompt: Prompt, params: SamplingParams, *, sample_id: int, group_id: int) -> RolloutRecord:
        if sample_id == REJECTED:
            raise RecordRejected("no_line", "the script has no line for this sample")
        conversation = Conversation(prompt)
        conversation.add(self._answer(sample_id, params))
        return conversation.record(sample_id=sample_id, group_id=group_id, keep_changed=False)

    async def turn(
        self, context: Sequence[int], params: SamplingParams, *, start: int = 0, bare: bool = False
    ) -> SampledTurn:
        return self._answer(context[-1], params)

    async def load_weights(self, push: WeightPush) -> None:
        self.versions.append(push.version)

    async def receive_weights(self, version: int, shares: Sequence[Share]) -> None:
        raise AssertionError("it has no receivers of broadcasts")

    async def release_memory(self) -> None:
        """It has none."""

    def metrics(self) -> dict[str, float]:
        return {"rollout/script_lines": float(len(SCRIPT))}

    async def close(self) -> None:
        self.closed = True

    def _answer(self, line: int, params: SamplingParams) -> SampledTurn:
        tokens = np.array(SCRIPT[line % len(SCRIPT)][: params.max_new_tokens], np.int32)
        logprobs = np.full(len(tokens), -0.5, np.float32)
        versions = np.full(len(tokens), self.versions[-1], np.int32)
        return SampledTurn(tokens, logprobs, logprobs, versions, None, None, "stop")


class StuckEngine(ScriptedEngine):
    """Answers under the first weights, and never under those of a later push."""

    async def generate(self, prompt: Prompt, params: SamplingParams, *, sample_id: int, group_id: int) -> RolloutRecord:
        if self.versions[-1]:
            await asyncio.Event().wait()
        return await super().generate(prompt, params, sample_id=sample_id, group_id=group_id)
