"""From configuration to a running controller."""

from __future__ import annotations

from moe_trm.config.schema import Config
from moe_trm.errors import MoeTrmError
from moe_trm.rollout.bundle import BundleEngine
from moe_trm.rollout.controller import RolloutController
from moe_trm.rollout.engine import RolloutEngine
from moe_trm.rollout.sglang_client import SglangEngine
from moe_trm.tasks.build import build_task
from moe_trm.types import SamplingParams

MASK_LIMIT = 4096
"""Largest `top_k` for which SGLang returns a sampling mask (its `--sampling-mask-max-tokens`)."""


async def build_controller(config: Config, api_key: str | None) -> RolloutController:
    """Task, engine and controller; returns when the engine has answered."""
    task = build_task(config.task, config.model.checkpoint, config.seed)
    engine: RolloutEngine
    if config.rollout.engine == "bundle":
        assert config.rollout.bundle is not None
        engine = BundleEngine(config.rollout.bundle)
    else:
        engine = SglangEngine(config, api_key)
    try:
        await engine.start()
    except MoeTrmError:
        await engine.close()
        raise
    return RolloutController(
        config, engine, task, sampling_params(config, task.tokens.vocab_size, task.tokens.stop_token_ids)
    )


def sampling_params(config: Config, vocab_size: int, stop_token_ids: tuple[int, ...]) -> SamplingParams:
    """The behaviour policy's parameters; `top_k` is the vocabulary where none is set, at most what masks allow."""
    rollout = config.rollout
    largest = min(vocab_size, MASK_LIMIT) if config.sampling_mask.mode == "keep" else vocab_size
    return SamplingParams(
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=largest if rollout.top_k is None else min(rollout.top_k, largest),
        min_p=rollout.min_p,
        max_new_tokens=rollout.max_new_tokens,
        stop_token_ids=stop_token_ids,
    )
