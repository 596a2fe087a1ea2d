"""From configuration to a controller."""

from __future__ import annotations

import sys

from moe_trm.config.agent_rules import several_rows
from moe_trm.config.choices import wants_routes
from moe_trm.config.engines import DEFAULT
from moe_trm.config.rollout_rules import MASK_LIMIT
from moe_trm.config.schema import AdvantageConfig, AgentConfig, Config, KlConfig, RolloutConfig
from moe_trm.methods.advantages import ADVANTAGES
from moe_trm.methods.load import load_function
from moe_trm.models.hf_config import read_hf_config
from moe_trm.models.registry import indexer_layers
from moe_trm.rollout.agents.agent_host import AgentHost
from moe_trm.rollout.agents.agent_sampler import ADAPTER as AGENT_ADAPTER
from moe_trm.rollout.agents.agent_sampler import AgentSampler
from moe_trm.rollout.agents.command_host import CommandHost
from moe_trm.rollout.agents.live_session import Policy
from moe_trm.rollout.agents.parameters import MODEL
from moe_trm.rollout.agents.reader import build_reader
from moe_trm.rollout.agents.server import AgentServer
from moe_trm.rollout.controller import RolloutController
from moe_trm.rollout.engine import RolloutEngine
from moe_trm.rollout.greedy import GreedyBaseline, RecordedBaseline
from moe_trm.rollout.recorded import BundleEngine, RecordedSampler
from moe_trm.rollout.sampler import Sampler
from moe_trm.rollout.server_engine import ServerEngine
from moe_trm.rollout.servers.backend import backend_of
from moe_trm.rollout.servers.http import EngineHttp
from moe_trm.rollout.sessions.dialogue import Limits, TurnEngine
from moe_trm.rollout.sessions.function_sampler import ADAPTER, FunctionSampler
from moe_trm.rollout.single_turn import SingleTurn
from moe_trm.rollout.teacher import TaughtSampler
from moe_trm.runtime.functions.host import FunctionHost
from moe_trm.tasks.build import build_task
from moe_trm.tasks.protocol import Task
from moe_trm.types import SamplingParams


async def build_controller(config: Config, api_key: str | None) -> RolloutController:
    """Task, engine and controller, whose `start` is to come."""
    task = build_task(config.task, config.model.checkpoint, config.seed)
    engine = build_engine(config, api_key)
    params = sampling_params(config.rollout, config.keeps_masks, task.tokens.vocab_size, task.tokens.stop_token_ids)
    sampler: Sampler | None = None
    try:
        await task.start()
        keeps = config.replay.missing == "native"
        sampler = await build_sampler(config.rollout, config.agent, engine, task, params, keep_changed=keeps)
        sampler = with_baseline(config.advantage, config.rollout, engine, sampler, params)
        sampler = with_teacher(config.kl, config.rollout, sampler, api_key)
    except BaseException:  # a cancellation too
        if sampler is not None:
            await sampler.close()
        await task.close()
        await engine.close()
        raise
    hf = read_hf_config(config.model.checkpoint)
    layers = indexer_layers(hf) if wants_routes(config) else ()
    return RolloutController(
        config, engine, task, params, sampler, indexers=(layers, int(hf["index_topk"])) if layers else None
    )


def build_engine(config: Config, api_key: str | None) -> RolloutEngine:
    """The engine that `rollout.engine` names, not started. Raises `ConfigError` for one that cannot be loaded."""
    name = config.rollout.engine
    if config.rollout.traits.has_servers:
        return ServerEngine(config, api_key)
    if name == "bundle":
        assert config.rollout.bundle is not None
        return BundleEngine(
            config.rollout.bundle,
            prompts_grow=config.rollout.function is not None,
            prompts_own=config.rollout.agent is not None,
            several_rows=several_rows(config.rollout, config.agent),
            waits=config.pipeline.mode != "sync",
            push_every=config.pipeline.push_every,
            delay_s=config.rollout.bundle_delay_s,
        )
    engine: RolloutEngine = load_function(name, key="rollout.engine")(config, api_key)
    return engine


async def build_sampler(
    rollout: RolloutConfig,
    agent: AgentConfig,
    engine: RolloutEngine,
    task: Task,
    params: SamplingParams,
    *,
    keep_changed: bool,
) -> Sampler:
    """The sampler of the run: a function or an agent of the user's own, loaded here, or one answer to the prompt.

    Raises `ConfigError` when the function cannot be loaded.
    """
    if not rollout.has_turns:
        return SingleTurn(engine, task, params)
    if not engine.traits.samples_live:
        return RecordedSampler(engine, task, params)
    if rollout.agent is not None:
        agents = agent_sampler(agent, rollout, engine, task, params, keep_changed=keep_changed)
        await agents.start()
        return agents
    functions = function_sampler(rollout, engine, task, params, keep_changed=keep_changed)
    await functions.start()
    return functions


def with_baseline(
    advantage: AdvantageConfig, rollout: RolloutConfig, engine: RolloutEngine, sampler: Sampler, params: SamplingParams
) -> Sampler:
    """`sampler`, with the reward of a greedy answer in every sample where the advantage reads one."""
    if not ADVANTAGES[advantage.name].reads_greedy:
        return sampler
    if not engine.traits.samples_live:
        return RecordedBaseline(sampler)
    return GreedyBaseline(sampler, params, rollout.group_size)


def with_teacher(kl: KlConfig, rollout: RolloutConfig, sampler: Sampler, api_key: str | None) -> Sampler:
    """`sampler`, with the log-probs of the teacher in every sample where there is one."""
    if not kl.teacher:
        return sampler
    servers = [
        EngineHttp(url, api_key, timeout_s=rollout.timeout_s, max_attempts=rollout.max_attempts) for url in kl.teacher
    ]
    return TaughtSampler(sampler, servers, backend_of(DEFAULT), rollout.server.startup_timeout_s)


def function_sampler(
    rollout: RolloutConfig, engine: TurnEngine, task: Task, params: SamplingParams, *, keep_changed: bool
) -> FunctionSampler:
    """The sampler of `rollout.function`, not started."""
    assert rollout.function is not None, "the caller has looked"
    host = FunctionHost(rollout.function, adapter=ADAPTER, key="rollout.function", limit_s=rollout.function_timeout_s)
    return FunctionSampler(host, engine, task, params, limits_of(rollout, task), keep_changed=keep_changed)


def agent_sampler(
    agent: AgentConfig,
    rollout: RolloutConfig,
    engine: TurnEngine,
    task: Task,
    params: SamplingParams,
    *,
    keep_changed: bool,
) -> AgentSampler:
    """The sampler of `rollout.agent`, not started. Raises `ConfigError` for a parser that cannot be had."""
    assert rollout.agent is not None, "the caller has looked"
    reader = build_reader(agent.tool_parser, agent.reasoning_parser)
    server = AgentServer(agent.host, agent.port, max_body_bytes=agent.max_body_bytes)
    policy = Policy(engine, task.tokens, reader, limits_of(rollout, task), (MODEL, *agent.model_names))
    host = agent_host(agent, rollout)
    return AgentSampler(host, server, policy, task, params, keep_changed=keep_changed, rows=agent.rows)


def agent_host(agent: AgentConfig, rollout: RolloutConfig) -> AgentHost:
    """The host of `rollout.agent`, not started."""
    started = rollout.agent
    if isinstance(started, tuple):
        return CommandHost(
            started,
            limit_s=rollout.function_timeout_s,
            most_at_once=agent.max_commands,
            max_output_bytes=agent.max_output_bytes,
        )
    assert started is not None, "the caller has looked"
    return FunctionHost(started, adapter=AGENT_ADAPTER, key="rollout.agent", limit_s=rollout.function_timeout_s)


def limits_of(rollout: RolloutConfig, task: Task) -> Limits:
    """The limits of one sample."""
    return Limits(rollout.max_turns, rollout.max_tokens or task.tokens.max_positions or sys.maxsize)


def sampling_params(
    rollout: RolloutConfig, keeps_masks: bool, vocab_size: int, stop_token_ids: tuple[int, ...]
) -> SamplingParams:
    """The behaviour policy's parameters; `top_k` is the vocabulary where none is set, at most what masks allow."""
    largest = min(vocab_size, MASK_LIMIT) if keeps_masks else vocab_size
    return SamplingParams(
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=largest if rollout.top_k is None else min(rollout.top_k, largest),
        min_p=rollout.min_p,
        max_new_tokens=rollout.max_new_tokens,
        stop_token_ids=stop_token_ids,
    )
