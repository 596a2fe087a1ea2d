"""From configuration to a running controller."""

from __future__ import annotations

import sys

from moe_trm.config.rollout_rules import MASK_LIMIT
from moe_trm.config.schema import Config, RolloutConfig
from moe_trm.errors import MoeTrmError
from moe_trm.functions.host import FunctionHost
from moe_trm.functions.load import load_function
from moe_trm.rollout.controller import RolloutController
from moe_trm.rollout.engine import RolloutEngine
from moe_trm.rollout.recorded import BundleEngine, RecordedSampler
from moe_trm.rollout.sampler import Sampler, SingleTurn
from moe_trm.rollout.sessions.dialogue import Limits
from moe_trm.rollout.sessions.function_sampler import ADAPTER, FunctionSampler
from moe_trm.rollout.sglang.engine import SglangEngine
from moe_trm.tasks.build import build_task
from moe_trm.tasks.protocol import Task
from moe_trm.types import SamplingParams


async def build_controller(config: Config, api_key: str | None) -> RolloutController:
    """Task, engine and controller; returns when the engine has answered."""
    task = build_task(config.task, config.model.checkpoint, config.seed)
    engine = build_engine(config, api_key)
    params = sampling_params(config, task.tokens.vocab_size, task.tokens.stop_token_ids)
    try:
        await task.start()
        sampler = await build_sampler(
            config.rollout, engine, task, params, keep_changed=config.replay.missing == "native"
        )
        await engine.start()
    except MoeTrmError:
        await task.close()
        await engine.close()
        raise
    return RolloutController(config, engine, task, params, sampler)


def build_engine(config: Config, api_key: str | None) -> RolloutEngine:
    """The engine that `rollout.engine` names, not started. Raises `ConfigError` for one that cannot be loaded."""
    name = config.rollout.engine
    if name == "sglang":
        return SglangEngine(config, api_key)
    if name == "bundle":
        assert config.rollout.bundle is not None
        return BundleEngine(
            config.rollout.bundle,
            prompts_grow=config.rollout.function is not None,
            waits=config.pipeline.mode != "sync",
            delay_s=config.rollout.bundle_delay_s,
        )
    engine: RolloutEngine = load_function(name, key="rollout.engine")(config, api_key)
    return engine


async def build_sampler(
    rollout: RolloutConfig, engine: RolloutEngine, task: Task, params: SamplingParams, *, keep_changed: bool
) -> Sampler:
    """The sampler of the run: a function of the user's own, loaded here, or one answer to the prompt.

    Raises `ConfigError` when the function cannot be loaded.
    """
    if rollout.function is None:
        return SingleTurn(engine, task, params)
    if not engine.traits.samples_live:
        return RecordedSampler(engine, task, params)
    host = FunctionHost(rollout.function, adapter=ADAPTER, key="rollout.function", limit_s=rollout.function_timeout_s)
    await host.start()
    limits = Limits(rollout.max_turns, rollout.max_tokens or task.tokens.max_positions or sys.maxsize)
    return FunctionSampler(host, engine, task, params, limits, keep_changed=keep_changed)


def sampling_params(config: Config, vocab_size: int, stop_token_ids: tuple[int, ...]) -> SamplingParams:
    """The behaviour policy's parameters; `top_k` is the vocabulary where none is set, at most what masks allow."""
    rollout = config.rollout
    largest = min(vocab_size, MASK_LIMIT) if config.keeps_masks else vocab_size
    return SamplingParams(
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=largest if rollout.top_k is None else min(rollout.top_k, largest),
        min_p=rollout.min_p,
        max_new_tokens=rollout.max_new_tokens,
        stop_token_ids=stop_token_ids,
    )
