"""Recordings made without an engine, for runs whose subject is not sampling.

Their records are valid, with made-up answers, routes and masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from moe_trm.config.schema import Config
from moe_trm.recording.bundle import BundleWriter
from moe_trm.rollout.servers.served_model import ServedModel
from moe_trm.sampling_mask.record import SamplingMask
from moe_trm.tasks.build import build_task
from moe_trm.types import Prompt, RolloutRecord
from routing import RouteRecord, expert_dtype, token_digest

KEPT = 4


def make_recording(config: Config, folder: Path, steps: int, *, age: int = 0, every: int = 1) -> Path:
    """A bundle of `steps` steps that answers the prompts of `config`.

    Its samples are `age` versions old when they are trained, where there were as many, and of versions that were pushed
    every `every` steps. Run it with `replay.max_local_flip_rate=1`, as no router chose these routes, and with
    `rollout.top_k=4`, which leaves open what the kept sets are.
    """
    task = build_task(config.task, config.model.checkpoint, config.seed)
    model = ServedModel.from_checkpoint(Path(config.model.checkpoint))
    writer, size = BundleWriter(str(folder)), config.rollout.group_size
    for step in range(1, steps + 1):
        prompts = task.train_prompts(step, config.rollout.prompts_per_step)
        first = (step - 1) * len(prompts)
        records = [
            _record(
                prompt,
                # Every other answer is right, so that there is something to learn.
                task.tokens.encode_plain(f"{'' if j % 2 else '1'}#{prompt.answer if j % 2 else 'no'}"),
                task.tokens.stop_token_ids[0],
                model,
                sample_id=(first + i) * size + j,
                group_id=first + i,
                version=max(0, step - 1 - age) // every * every,
            )
            for i, prompt in enumerate(prompts)
            for j in range(size)
        ]
        writer.write(step, records)
    return folder


def _record(
    prompt: Prompt,
    answer: Sequence[int],
    stop: int,
    model: ServedModel,
    *,
    sample_id: int,
    group_id: int,
    version: int,
) -> RolloutRecord:
    rng = np.random.default_rng(sample_id)
    sampled = np.array([*answer, stop])
    num_sampled = len(sampled)
    tokens = np.concatenate([prompt.token_ids, sampled]).astype(np.int32)
    others = [rng.permutation(np.delete(np.arange(model.vocab_size), token))[: KEPT - 1] for token in sampled]
    kept = np.concatenate([sampled[:, None], np.array(others)], axis=1)
    logprobs = np.log(rng.dirichlet(np.ones(KEPT), num_sampled)).astype(np.float32)
    shape = (len(tokens) - 1, len(model.moe_layer_ids), model.num_experts)
    experts = np.argsort(rng.random(shape), -1)[..., : model.top_k].astype(expert_dtype(model.num_experts))
    return RolloutRecord(
        sample_id=sample_id,
        group_id=group_id,
        prompt_id=prompt.prompt_id,
        tokens=tokens,
        sampled=np.arange(len(tokens)) >= len(prompt.token_ids),
        turn_ids=np.zeros(len(tokens), np.int16),
        rollout_logprobs=logprobs[:, 0].copy(),
        full_logprobs=logprobs[:, 0] - np.float32(0.1),
        versions=np.full(num_sampled, version, np.int32),
        routes=RouteRecord(experts, model.moe_layer_ids, model.num_experts, token_digest(tokens)),
        sampling_mask=SamplingMask(
            kept.reshape(-1).astype(np.int32), np.arange(num_sampled + 1, dtype=np.int64) * KEPT, logprobs.reshape(-1)
        ).ascending(),
        finish_reason="stop",
    )
