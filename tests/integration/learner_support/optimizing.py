"""Scenarios of the optimizer and of micro-batches under a token budget; see `scenarios.py`."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from moe_trm.batch.collate import collate
from moe_trm.batch.plan import plan_step
from moe_trm.learner.megatron.learner import MegatronLearner
from moe_trm.learner.protocol import Scores, UpdateResult
from moe_trm.sync.rounding import Rounding
from moe_trm.types import MiniBatch, RolloutRecord, TokenBatch, TrainRow
from routing.record.sources import Native
from tests.integration.learner_support.tiny import VOCAB

Build = Callable[..., MegatronLearner]
NUM_ROWS = 24


def skewed_rows() -> list[TrainRow]:
    """Rows of 6 to 64 tokens, most of them short."""
    rng = np.random.default_rng(5)
    return [
        TrainRow(_record(rng, number, int(length)))
        for number, length in enumerate(np.clip(rng.lognormal(2.5, 0.8, NUM_ROWS), 6, 64))
    ]


def _record(rng: np.random.Generator, number: int, length: int) -> RolloutRecord:
    sampled = np.arange(length) >= 3
    nothing = np.zeros(int(sampled.sum()), np.float32)
    return RolloutRecord(
        sample_id=number,
        group_id=number // 4,
        prompt_id=str(number // 4),
        tokens=rng.integers(0, VOCAB, length).astype(np.int32),
        sampled=sampled,
        turn_ids=np.zeros(length, np.int16),
        rollout_logprobs=nothing,
        full_logprobs=nothing,
        versions=np.zeros(len(nothing), np.int32),
        routes=None,
        sampling_mask=None,
        finish_reason="stop",
        reward=0.0,
    )


def update_planned(learner: MegatronLearner, mini: MiniBatch) -> UpdateResult:
    """One step on a smooth loss over the scored tokens, divided by those of the whole minibatch."""
    batches = [collate(micro, keep_mask=False) for micro in mini.micro_batches]

    def loss(index: int, current: Scores) -> Tensor:
        # An advantage for each row: any number that is its own.
        advantages = torch.tensor([[math.sin(9.0 * number)] for number in batches[index].sample_ids])
        values = batches[index].mask * advantages * current.logprobs + 0.05 * current.logprobs.square()
        return values.sum() / mini.num_tokens

    return learner.update(batches, [Native()] * len(batches), loss)


def budget(build: Build, gradients: Callable[[MegatronLearner], dict[str, Tensor]], options: dict[str, str]) -> Any:
    """Gradients of one minibatch cut by `tokens`, and the shapes of this rank's micro-batches."""
    learner = build(options)
    captured: dict[str, Tensor] = {}
    apply = learner._optimizer.step

    def capture_and_step(lr_scale: float = 1.0) -> UpdateResult:
        captured.update(gradients(learner))
        return apply(lr_scale)

    learner._optimizer.step = capture_and_step  # type: ignore[method-assign]
    plan = plan_step(
        skewed_rows(),
        seed=0,
        step=1,
        minibatches=1,
        data_size=learner.data_size,
        micro_batch_tokens=int(options["tokens"]),
    )
    [mini] = plan[learner.data_rank]
    update_planned(learner, mini)
    shapes = [collate(micro, keep_mask=False).input_ids.shape for micro in mini.micro_batches]
    return captured, {"shapes": torch.tensor([list(shape) for shape in shapes])}


def groups(
    build: Build, out: Path, batches: list[TokenBatch], loss: Callable[[int, Scores], Tensor]
) -> dict[str, float]:
    """A step with a frozen router, a still embedding and a slow output layer; then weight decay alone."""
    sources = [Native()] * len(batches)
    chosen = [{"match": "embed_tokens", "lr_multiplier": 0.0}, {"match": "lm_head", "lr_multiplier": 0.5}]
    learner = build({"expert": str(dist.get_world_size()), "freeze_router": "1"}, groups=chosen)
    result = learner.update(batches, sources, loss)
    learner.export_shard(str(out / "grouped"), Rounding("float32"))
    decayed = build(
        {"expert": str(dist.get_world_size())},
        weight_decay=0.1,
        groups=[{"match": "q_norm", "weight_decay": 0.3}, {"match": "o_proj", "weight_decay": 0.0}],
        schedule="linear",
        decay_steps=4,
        min_lr=0.2,
    )
    decayed.export_shard(str(out / "before"), Rounding("float32"))
    # A gradient of zero would make no step.
    decayed.update(batches, sources, lambda i, current: 1e-12 * loss(i, current))
    decayed.export_shard(str(out / "decayed"), Rounding("float32"))
    rates = [decayed.update(batches, sources, loss).lr for _ in range(4)]
    return {"grad_norm": result.grad_norm, **{f"lr.{i}": rate for i, rate in enumerate(rates)}}
