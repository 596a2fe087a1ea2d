"""One prompt through everything of the user's own, before a server is started: template, rollout function, reward.

The answer is the expected one, or nothing where there is none. So a reward need not be good; it has to be a number.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

import numpy as np

from moe_trm.config.schema import Config
from moe_trm.errors import ConfigError, RecordRejected
from moe_trm.functions.host import FunctionHost
from moe_trm.rollout.build import sampling_params
from moe_trm.rollout.sessions.dialogue import Limits
from moe_trm.rollout.sessions.function_sampler import ADAPTER, FunctionSampler
from moe_trm.tasks.build import build_task
from moe_trm.tasks.protocol import Task
from moe_trm.tasks.reward_input import RewardInput
from moe_trm.tasks.rewards import read_reward
from moe_trm.types import Prompt, SampledTurn, SamplingParams


def try_task(config: Config) -> None:
    """Read all prompts, render the first, and call the reward and the rollout function once each.

    Raises:
        CheckpointError: a tokenizer or a chat template that does not fit.
        ConfigError: prompts that cannot be read; a function that cannot be loaded, that fails, takes too long, or
            returns no number.
    """
    task = build_task(config.task, config.model.checkpoint, config.seed)
    prompt = task.train_prompts(1, 1)[0]
    asyncio.run(_call(config, task, prompt))


async def _call(config: Config, task: Task, prompt: Prompt) -> None:
    try:
        await task.start()
        if config.rollout.function is not None and config.rollout.traits.samples_live:
            await _rollout(config, task, prompt)
        else:
            await _reward(task, prompt)
    except RecordRejected as failure:
        key = "task.reward" if failure.reason.startswith("reward_") else "rollout.function"
        raise ConfigError(
            f"{failure.what}, tried on the prompt {prompt.prompt_id} with its expected answer",
            where=f"config key {key}",
            got=failure.got,
            expected=failure.expected,
            fix=failure.fix,
        ) from failure
    finally:
        await task.close()


async def _reward(task: Task, prompt: Prompt) -> None:
    sample = RewardInput(
        prompt_id=prompt.prompt_id,
        prompt=prompt.text,
        answer=prompt.answer,
        completion=prompt.answer,
        completion_ids=task.tokens.encode_plain(prompt.answer),
        transcript=prompt.answer,
        num_turns=1,
        finish_reason="stop",
        extra=prompt.extra,
    )
    read_reward(await task.reward(sample), task.reward_weights, f"prompt {prompt.prompt_id}")


async def _rollout(config: Config, task: Task, prompt: Prompt) -> None:
    rollout = config.rollout
    assert rollout.function is not None
    host = FunctionHost(rollout.function, adapter=ADAPTER, key="rollout.function", limit_s=rollout.function_timeout_s)
    try:
        await host.start()
        params = sampling_params(config, task.tokens.vocab_size, task.tokens.stop_token_ids)
        limits = Limits(rollout.max_turns, rollout.max_tokens or task.tokens.max_positions or sys.maxsize)
        sampler = FunctionSampler(host, _Answering(task, prompt), task, params, limits, keep_changed=True)
        await sampler.answer(prompt, params)
    finally:
        await host.close()


class _Answering:
    """A policy that always gives the expected answer."""

    def __init__(self, task: Task, prompt: Prompt) -> None:
        self._tokens = (*task.tokens.encode_plain(prompt.answer), task.tokens.stop_token_ids[0])

    async def turn(
        self, context: Sequence[int], params: SamplingParams, *, start: int = 0, bare: bool = False
    ) -> SampledTurn:
        tokens = np.array(self._tokens[: params.max_new_tokens], np.int32)
        nothing = np.zeros(len(tokens), np.float32)
        reason = "stop" if len(tokens) == len(self._tokens) else "length"
        return SampledTurn(tokens, nothing, nothing, np.zeros(len(tokens), np.int32), None, None, reason)
