"""A prompt through everything of the user's own, before a server is started: template, rollout function, reward.

The answer is the expected one, or nothing where there is none. So a reward need not be good; it has to be a number. A
function that fails on one prompt and works on another costs a run only that sample, so a few prompts are tried.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

import numpy as np

from moe_trm.config.schema import AgentConfig, Config, EvalConfig, RolloutConfig
from moe_trm.errors import ConfigError, RecordRejected
from moe_trm.rollout.agents.agent_sampler import AgentSampler
from moe_trm.rollout.build import agent_sampler, function_sampler, sampling_params
from moe_trm.rollout.sessions.function_sampler import FunctionSampler
from moe_trm.tasks.build import build_task
from moe_trm.tasks.examples import MAX_LISTED
from moe_trm.tasks.file_task import FileTask
from moe_trm.tasks.protocol import Task
from moe_trm.tasks.reward_input import RewardInput
from moe_trm.tasks.rewards import read_reward
from moe_trm.types import Prompt, SampledTurn, SamplingParams

_log = logging.getLogger(__name__)
TRIED = 3
"""Prompts that are tried until the user's functions work on one."""


def try_task(config: Config) -> None:
    """Read all prompts, render the first ones, and call the reward and the rollout function until they work on one.

    Prompts that leave no room for an answer are counted and named in a warning.

    Raises `CheckpointError` for a tokenizer or a chat template that does not fit, `ConfigError` for prompts that cannot
    be read, and for a function that cannot be loaded, fails, takes too long, or returns no number, on every prompt
    tried; and for `task.reward_weights` of rewards that the function does not return.
    """
    task = build_task(config.task, config.model.checkpoint, config.seed)
    for line in (*too_long(task, config.rollout, config.eval), *lacking(task)):
        _log.warning(line)
    answer: Callable[[Prompt], Awaitable[None]] = partial(_reward, task)
    if config.rollout.has_turns and config.rollout.traits.samples_live:
        answer = partial(_rollout, config.rollout, config.agent, config.keeps_masks, task)
    failures = asyncio.run(_try(task, answer))
    if len(failures) == TRIED:
        prompt, failure = failures[0]
        raise ConfigError(
            f"{failure.what}, tried on the prompt {prompt.prompt_id} with its expected answer",
            where=_key(config.rollout, failure),
            got=failure.got,
            expected=failure.expected,
            fix=failure.fix,
        ) from failure
    for prompt, failure in failures:
        _log.warning(
            "%s: %s on the prompt %s: %s", _key(config.rollout, failure), failure.what, prompt.prompt_id, failure.got
        )


def too_long(task: Task, rollout: RolloutConfig, evaluation: EvalConfig) -> list[str]:
    """Lines about prompts that leave no room for an answer, by what `config.json` and the settings say.

    An engine asked for one answer must have room for all of `rollout.max_new_tokens`. Functions and agents are given
    what is left.
    """
    positions = task.tokens.max_positions
    if positions is None or not isinstance(task, FileTask):
        return []
    limit = min(positions, rollout.max_tokens or positions) if rollout.has_turns else positions
    answer = 1 if rollout.has_turns else rollout.max_new_tokens
    held_out = 1 if rollout.has_turns else evaluation.max_new_tokens or answer
    limits = [("training", answer, task.num_train, task.longer_than(limit - answer))]
    for name, prompts in task.eval_sets().items():
        long = [prompt for prompt in prompts if len(prompt.token_ids) > limit - held_out]
        limits.append((f"held-out {name}".strip(), held_out, len(prompts), long))
    return [
        f"{len(long)} of {number} {which} prompts leave no room for {new} new tokens in {limit}, and will be rejected: "
        + ", ".join(f"{prompt.prompt_id} ({len(prompt.token_ids)} tokens)" for prompt in long[:MAX_LISTED])
        + (f" and {len(long) - MAX_LISTED} more" if len(long) > MAX_LISTED else "")
        for which, new, number, long in limits
        if long
    ]


def lacking(task: Task) -> list[str]:
    """A line about characters of prompts and answers that the tokenizer has no token for."""
    characters = task.tokens.lacking(task.characters()) if isinstance(task, FileTask) else []
    if not characters:
        return []
    listed = " ".join(map(repr, characters[:MAX_LISTED]))
    return [
        f"the tokenizer has no token for {len(characters)} of the characters in prompts and answers, so the policy can "
        f"neither read nor write them: {listed}" + (" ..." if len(characters) > MAX_LISTED else "")
    ]


async def _try(task: Task, answer: Callable[[Prompt], Awaitable[None]]) -> list[tuple[Prompt, RecordRejected]]:
    """The prompts on which the functions failed before they worked on one."""
    failures: list[tuple[Prompt, RecordRejected]] = []
    try:
        await task.start()
        for prompt in itertools.islice(itertools.cycle(task.train_prompts(1, TRIED)), TRIED):
            try:
                await answer(prompt)
            except RecordRejected as failure:
                failures.append((prompt, failure))
            else:
                break
    finally:
        await task.close()
    return failures


def _key(rollout: RolloutConfig, failure: RecordRejected) -> str:
    made_by = "rollout.agent" if rollout.agent is not None else "rollout.function"
    return f"config key {'task.reward' if failure.reason.startswith('reward_') else made_by}"


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
    reward = read_reward(await task.reward(sample), task.reward_weights, f"prompt {prompt.prompt_id}")
    _check_weights(task.reward_weights, reward.parts)


def _check_weights(weights: Mapping[str, float], parts: Mapping[str, float]) -> None:
    unknown = sorted(set(weights) - set(parts))
    if unknown:
        raise ConfigError(
            "these rewards have a weight and are not returned",
            where="task.reward_weights",
            got=", ".join(unknown),
            expected=", ".join(parts) or "none: the reward is one number",
            fix="correct the name; where only some answers have that reward, return it as 0 for the others",
        )


async def _rollout(rollout: RolloutConfig, agent: AgentConfig, keeps_masks: bool, task: Task, prompt: Prompt) -> None:
    params = sampling_params(rollout, keeps_masks, task.tokens.vocab_size, task.tokens.stop_token_ids)
    engine = _Answering(task, prompt)
    sampler: AgentSampler | FunctionSampler
    if rollout.agent is not None:
        sampler = agent_sampler(agent, rollout, engine, task, params, keep_changed=True)
    else:
        sampler = function_sampler(rollout, engine, task, params, keep_changed=True)
    try:
        await sampler.start()
        await sampler.answer(prompt, params)
    finally:
        await sampler.close()


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
