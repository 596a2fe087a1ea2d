"""Samples made by a user's rollout function (`rollout.function`): several answers, tools, environments.

Reasons of rejection, besides those of the engine's answers:

- `rollout_error`: it raised. `rollout_timeout`. `rollout_crash`: it ended its process.
- `rollout_type`: its result is no reward. `rollout_nan`: a reward that is not finite.
- `empty_output`: it never sampled.
"""

from __future__ import annotations

from typing import Any

from moe_trm.errors import RecordRejected
from moe_trm.rollout.sampler import rewarded
from moe_trm.rollout.sessions.dialogue import Dialogue, Limits, TurnEngine
from moe_trm.rollout.turn import naming
from moe_trm.runtime.functions.host import FunctionHost
from moe_trm.runtime.functions.process import FunctionFailed
from moe_trm.tasks.protocol import Task
from moe_trm.tasks.rewards import read_reward, score
from moe_trm.types import Prompt, RolloutRecord, SamplingParams

ADAPTER = "moe_trm.rollout.sessions.session:adapt"


class FunctionSampler:
    """`Sampler` that lets the function of `host` talk with the engine, within `limits` for one sample.

    `task` gives the reward where the function does not, and the tokenizer. `keep_changed`: keep samples with an answer
    during which the weights changed, without the earlier routes.
    """

    def __init__(
        self,
        host: FunctionHost,
        engine: TurnEngine,
        task: Task,
        params: SamplingParams,
        limits: Limits,
        *,
        keep_changed: bool,
    ) -> None:
        self._host, self._engine, self._task, self._params, self._limits = host, engine, task, params, limits
        self._keep_changed = keep_changed

    async def start(self) -> None:
        """Load the function. Raises `ConfigError`."""
        await self._host.start()

    async def sample(self, prompt: Prompt, *, sample_id: int, group_id: int) -> RolloutRecord:
        """See `Sampler.sample`."""
        with naming(f"sample {sample_id}"):
            return await self._make(prompt, self._params, sample_id=sample_id, group_id=group_id, bare=False)

    async def answer(self, prompt: Prompt, params: SamplingParams) -> RolloutRecord:
        """A rewarded sample for an evaluation, made with other parameters and without routes and masks.

        Raises as `sample` does.
        """
        with naming(f"prompt {prompt.prompt_id}"):
            return await self._make(prompt, params, sample_id=-1, group_id=-1, bare=True)

    def metrics(self) -> dict[str, float]:
        """See `Sampler.metrics`."""
        return {}

    async def close(self) -> None:
        """End the function's process."""
        await self._host.close()

    async def _make(
        self, prompt: Prompt, params: SamplingParams, *, sample_id: int, group_id: int, bare: bool
    ) -> RolloutRecord:
        dialogue, returned = await self._run(prompt, params, bare=bare)
        record = dialogue.conversation.record(
            sample_id=sample_id,
            group_id=group_id,
            keep_changed=self._keep_changed,
            finish_reason=dialogue.finish_reason,
        )
        if returned is None:
            return rewarded(record, await score(self._task, prompt, record), prompt)
        return rewarded(
            record,
            read_reward(
                returned, self._task.reward_weights, prompt.prompt_id, prefix="rollout", place=self._host.place
            ),
            prompt,
        )

    async def _run(self, prompt: Prompt, params: SamplingParams, *, bare: bool) -> tuple[Dialogue, Any]:
        """The conversation of the function, and its result."""
        tokens = self._task.tokens
        dialogue: Dialogue

        def begin() -> Dialogue:
            nonlocal dialogue
            dialogue = Dialogue(prompt, self._engine, tokens, params, self._limits, bare=bare)
            return dialogue

        payload = {
            "prompt_id": prompt.prompt_id,
            "text": prompt.text,
            "answer": prompt.answer,
            "token_ids": prompt.token_ids,
            "extra": prompt.extra,
        }
        try:
            returned = await self._host.call(payload, begin)
        except FunctionFailed as failure:
            raise RecordRejected(
                f"rollout_{failure.reason}",
                "the rollout function failed",
                got=failure.what,
                expected="a sample in time",
                fix="rollout.function_timeout_s bounds one call; its standard error is in the controller's log",
            ) from failure
        return dialogue, returned
